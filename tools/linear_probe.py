from ssvit.cli.evaluate import linear_probe, main

if __name__ == "__main__":
    main("linear_probe", linear_probe)
