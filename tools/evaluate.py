"""All measures of an encoder's frozen features, and one report: python tools/evaluate.py checkpoint=PATH"""

from ssvit.cli.evaluate import main

if __name__ == "__main__":
    main()
