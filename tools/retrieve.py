"""Find pictures that look alike: python tools/retrieve.py action=index|add|query store=FOLDER PICTURES…|data=SET"""

from ssvit.cli.retrieve import main

if __name__ == "__main__":
    main()
