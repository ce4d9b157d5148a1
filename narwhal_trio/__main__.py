"""`python -m narwhal_trio` is the `narwhal-trio` command."""

from __future__ import annotations

import sys

from narwhal_trio.cli import main

sys.exit(main())
