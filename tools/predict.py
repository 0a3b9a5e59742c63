"""Name the classes of pictures: python tools/predict.py checkpoint=PATH PICTURES…"""

from ssvit.cli.predict import main

if __name__ == "__main__":
    main()
