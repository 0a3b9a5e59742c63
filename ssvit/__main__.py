"""python -m ssvit COMMAND …"""

import sys

from ssvit.cli.main import main

sys.argv[0] = "ssvit"  # as messages have it
main()
