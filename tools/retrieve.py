from ssvit.cli.retrieve import tool

if __name__ == "__main__":
    tool.main()
