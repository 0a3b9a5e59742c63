from ssvit.cli.evaluate import linear

if __name__ == "__main__":
    linear.main()
