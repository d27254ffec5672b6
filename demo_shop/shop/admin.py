from django.contrib import admin

from .models import Address, Cart, CartItem, Order, OrderLine, Payment, Product


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "stock"]
    prepopulated_fields = {"slug": ["name"]}


@admin.register(Address)
class AddressAdmin(admin.ModelAdmin):
    list_display = ["recipient", "street", "postcode", "city", "owner"]
    list_select_related = ["owner"]


class CartItemInline(admin.TabularInline):
    model = CartItem
    extra = 0


@admin.register(Cart)
class CartAdmin(admin.ModelAdmin):
    inlines = [CartItemInline]


class OrderLineInline(admin.TabularInline):
    model = OrderLine
    extra = 0


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["number", "customer", "total", "status", "till", "created_at"]
    list_filter = ["status", "till"]
    list_select_related = ["customer"]
    inlines = [OrderLineInline]


@admin.register(Payment)
class PaymentAdmin(admin.ModelAdmin):
    list_display = ["order", "amount", "charge_id", "created_at"]
    list_select_related = ["order"]
