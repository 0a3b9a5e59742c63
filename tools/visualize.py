from ssvit.cli.visualize import tool

if __name__ == "__main__":
    tool.main()
