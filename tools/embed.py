from ssvit.cli.embed import tool

if __name__ == "__main__":
    tool.main()
