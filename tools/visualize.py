"""Look into an encoder: python tools/visualize.py checkpoint=PATH PICTURES…"""

from ssvit.cli.visualize import main

if __name__ == "__main__":
    main()
