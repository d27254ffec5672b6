from django import forms


class CartForm(forms.Form):
    """How many pieces the cart shall hold; none takes the product out."""

    quantity = forms.IntegerField(min_value=0, max_value=99)


class BuyForm(forms.Form):
    quantity = forms.IntegerField(min_value=1, max_value=99, initial=1)
