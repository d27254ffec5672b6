from django.contrib.auth import views as auth
from django.urls import path

from . import views

app_name = "shop"

urlpatterns = [
    path("", views.catalogue, name="catalogue"),
    path("products/<slug:slug>/", views.product, name="product"),
    path("products/<slug:slug>/buy/", views.buy_now, name="buy-now"),
    path("cart/", views.cart, name="cart"),
    path("cart/<slug:slug>/", views.put_in_cart, name="put-in-cart"),
    path("checkout/", views.checkout, name="checkout"),
    path("orders/", views.orders, name="orders"),
    path("orders/<uuid:pk>/", views.order, name="order"),
    path("tills/", views.tills, name="tills"),
    path("sign-in/", auth.LoginView.as_view(template_name="shop/sign_in.html"), name="sign-in"),
    path("sign-out/", auth.LogoutView.as_view(), name="sign-out"),
]
