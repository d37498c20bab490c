"""`python -m ddtree_appliance` is the `ddtree-appliance` command."""

import sys

from ddtree_appliance.cli import main

sys.exit(main())
