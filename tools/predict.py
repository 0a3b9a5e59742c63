from ssvit.cli.predict import tool

if __name__ == "__main__":
    tool.main()
