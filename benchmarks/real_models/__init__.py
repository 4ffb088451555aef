"""`python -m benchmarks.real_models`: ONNX models that others trained, quantized by quark and by its peers.

    SQNR      10 log10( sum x^2 / sum (x - y)^2 ) of the first output over held-out samples, in dB
    metric    F1 of boxes at an IoU of 0.5 | IoU of text masks | share of equal classes, or texts
    time      seconds of a forward / those of the float model, one thread, runs of the two alternating, minima of both
    ms        milliseconds of a forward

The models come in wheels (nudenet, rapidocr-onnxruntime, magika), which are installed without what they need into an
environment of their own, beside onnxruntime and nncf; amd-quark is taken from .venv-peer where that is.
"""
