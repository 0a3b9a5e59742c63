from ssvit.cli.evaluate import knn

if __name__ == "__main__":
    knn.main()
