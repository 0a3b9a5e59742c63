from ssvit.cli.evaluate import tool

if __name__ == "__main__":
    tool.main()
