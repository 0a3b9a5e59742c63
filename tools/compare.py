from ssvit.cli.compare import tool

if __name__ == "__main__":
    tool.main()
