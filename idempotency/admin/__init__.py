"""The admin of operations and of outbox messages: find one by what a customer or a log says, and read
what happened.

Read-only, and safe on a table of any size: no COUNT, no case folding, no scan. The one thing that
can be done is to have messages sent again.
"""

from . import messages as messages
from . import operations as operations
