"""The admin of operations: find one by what a customer or a log says, and read what happened.

Read-only, and safe on a table of any size: no COUNT, no case folding, no scan.
"""

from . import operations as operations
