"""`python -m quark.onnx.tools.evaluate`."""

from quark.onnx.evaluation.compare_folders import main

if __name__ == "__main__":
    main()
