from ssvit.cli.export import tool

if __name__ == "__main__":
    tool.main()
