"""`python -m demo_shop`: the whole shop in one command."""

import sys

from .runner import main

sys.exit(main())
