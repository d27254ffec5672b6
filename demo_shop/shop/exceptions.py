"""What the shop refuses, in words for its customers."""


class ShopError(Exception):
    """Base class; the message may be shown to the customer."""


class OutOfStock(ShopError):
    """There is less in stock than was asked for."""


class AlreadyPlaced(ShopError):
    """An order with this id exists: the intent was served before."""


class AlreadyPaid(ShopError):
    """The order is paid; paying again would be a second charge."""


class AlreadyPaying(ShopError):
    """A payment for the order is under way, or its outcome is not known yet."""


class NotPaid(ShopError):
    """Only a paid order can be refunded."""


class PaymentRefused(ShopError):
    """The provider answered, and no money moved."""
