from ssvit.cli.cost import tool

if __name__ == "__main__":
    tool.main()
