"""`python -m kvq` is the `kvq` command."""

import sys

from kvq.cli import main

sys.exit(main())
