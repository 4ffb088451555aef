"""The operators that a graph of a file may call: they compute values of tensors, and reach nothing else.

An allow-list. What is not in it may open files, set the memory that another tensor lies in, call code of Python, or is
not known here. In it is what graphs of torch.export hold, quantized or not.
"""

from __future__ import annotations

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATEN = _names(
    """
        __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async
        _assert_scalar _assert_tensor_metadata _batch_norm_impl_index _batch_norm_with_update_functional _cast_Byte
        _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward _convolution
        _convolution_mode _embedding_bag _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _grouped_mm _int_mm _linalg_det
        _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax _masked_softmax
        _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _pdist_forward
        _prelu_kernel _reshape_copy _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_mm _softmax _stack _to_copy _trilinear _unique2 _unsafe_view
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_int4pack_mm _weight_int4pack_mm_for_cpu
        _weight_int8pack_mm _weight_norm _weight_norm_interface abs absolute acos acosh adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add addbmm
        addcdiv addcmul addmm addmv addr adjoint affine_grid_generator alias all allclose alpha_dropout amax amin
        aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere
        as_strided asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
        bartlett_window batch_norm bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
        bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil celu chain_matmul channel_shuffle
        cholesky cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip clone col2im column_stack
        combinations complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh cosine_similarity
        count_nonzero cov cross cross_entropy_loss cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach
        diag diag_embed diagflat diagonal diagonal_scatter diff digamma dim dist div divide dot dropout dsplit dstack
        einsum elu embedding embedding_bag empty empty_like empty_permuted empty_strided eq equal erf erfc erfinv exp
        exp2 expand expand_as expm1 eye fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
        feature_alpha_dropout feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2
        fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fix flatten flip fliplr flipud float_power floor
        floor_divide fmax fmin fmod frac frexp frobenius_norm full full_like gather gcd ge gelu ger glu greater
        greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hamming_window hann_window
        hardshrink hardsigmoid hardswish hardtanh heaviside histc hsplit hstack huber_loss hypot i0 igamma igammac
        im2col imag index index_add index_copy index_fill index_put index_reduce index_select inner instance_norm
        inverse is_complex is_contiguous is_floating_point is_nonzero is_signed isclose isfinite isin isinf isnan
        isneginf isposinf isreal istft item kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le
        leaky_relu lerp less less_equal lgamma lift lift_fresh lift_fresh_copy linalg_cholesky linalg_cholesky_ex
        linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor
        linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot
        linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm linear
        linspace log log10 log1p log2 log_sigmoid log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp
        logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm lstm_cell lt mH mT
        masked_fill masked_scatter masked_select matmul matrix_H matrix_exp matrix_power max max_pool1d
        max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d
        max_unpool3d maximum mean median meshgrid min minimum mish mm mode moveaxis movedim mse_loss msort mul
        multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy
        native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm ne neg negative
        new_empty new_empty_strided new_full new_ones new_zeros nextafter nll_loss nll_loss_forward nll_loss_nd nonzero
        nonzero_static norm norm_except_dim normal not_equal nuclear_norm numel numpy_T one_hot ones ones_like outer pad
        pad_sequence pairwise_distance pdist permute permute_copy pinverse pixel_shuffle pixel_unshuffle polar polygamma
        positive pow prelu prod qr quantile rad2deg rand rand_like randint randint_like randn randn_like randperm range
        ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat
        repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as rms_norm rnn_relu
        rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu rsqrt rsub scalar_tensor
        scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted select select_copy select_scatter
        selu sgn sigmoid sign signbit silu sin sinc sinh size slice slice_copy slice_scatter slogdet slow_conv3d
        smooth_l1_loss softmax softplus softshrink sort special_airy_ai special_bessel_j0 special_bessel_j1
        special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf special_erfc special_erfcx
        special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
        special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_log_softmax special_logit
        special_logsumexp special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round
        special_sinc special_softmax special_xlog1py special_xlogy special_zeta split split_with_sizes sqrt square
        squeeze stack std std_mean stft storage_offset stride sub subtract sum sum_to_size svd swapaxes swapdims
        sym_constrain_range sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset
        sym_stride t take take_along_dim tan tanh tensor_split tensordot threshold tile to topk trace transpose
        trapezoid trapz triangular_solve tril tril_indices triu triu_indices true_divide trunc type_as unbind unflatten
        unfold uniform unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split
        unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex
        view_as_real vsplit vstack where xlogy zero zeros zeros_like
    """
)
"""Names in torch.ops.aten; with "_" after it, what does the same in place. Overloads with an `out` are not meant."""

OTHERS = {
    # What Python's own contexts and branches become.
    "higher_order": frozenset({"cond", "wrap_with_autocast", "wrap_with_set_grad_enabled"}),
    "quantized_decomposed": frozenset(
        f"{done}_per_{part}"
        for done in ("quantize", "dequantize")
        for part in ("tensor", "channel", "channel_group", "token")
    ),
    "torchvision": frozenset({"deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"}),
    "transformers": frozenset({"grouped_mm_fallback"}),
}
"""Of other namespaces. They are there where the package is imported that brings them."""

PYTHON = _names(
    """
        _operator.eq _operator.ne _operator.le _operator.lt _operator.ge _operator.gt _operator.neg _operator.pos
        _operator.add _operator.sub _operator.mul _operator.truediv _operator.floordiv _operator.mod _operator.pow
        _operator.and_ _operator.or_ _operator.not_ _operator.getitem
        torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sqrt
        torch.sym_sum math.ceil math.floor math.trunc math.sqrt
    """
)
"""Arithmetic of sizes."""


def is_allowed(target: str) -> bool:
    """Return True where a node of a file may have this target, as torch.export has it: "torch.ops.aten.add.Tensor"."""
    if target in PYTHON:
        return True
    if not target.startswith("torch.ops."):
        return False
    space, _, rest = target.removeprefix("torch.ops.").partition(".")
    name, _, overload = rest.partition(".")
    if space != "aten":
        return name in OTHERS.get(space, ())
    functional = name if name.endswith("__") else name.removesuffix("_")
    # One that writes into tensors that are passed for it may make them larger; so may one that is not known.
    operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    writes = operator is None or any(argument.is_out for argument in operator._schema.arguments)
    return functional in ATEN and not writes
