"""The words that a candidate may use: modules, names, attributes, and torch functions while it runs."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIBDEVICE_AT = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")
MODULES = ("torch", "triton", "triton.language", "math", *LIBDEVICE_AT)
TORCH = _words(
    "empty empty_like empty_strided zeros zeros_like full full_like Tensor dtype float16 float32 float64 bfloat16 "
    "int8 uint8 int16 int32 int64 bool float double half int long short strided contiguous_format preserve_format "
    "device numel is_tensor is_floating_point is_complex broadcast_tensors broadcast_shapes Size promote_types "
    "result_type clone flatten ravel reshape"
)
TRITON = _words("jit autotune heuristics Config cdiv next_power_of_2 language set_allocator")
MATH = _words("ceil exp floor log log10 log2 pow prod sqrt e inf pi")
LANGUAGE = _words(
    "abs advance arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas atomic_max atomic_min "
    "atomic_or atomic_xchg atomic_xor bfloat16 bitcast block_type broadcast broadcast_to cast cat cdiv ceil clamp "
    "constexpr cos cumprod cumsum debug_barrier device_assert dot dtype erf exp exp2 expand_dims fdiv flip float16 "
    "float32 float64 floor fma full gather histogram int1 int16 int32 int64 int8 interleave join load log log2 "
    "make_block_ptr math max max_constancy max_contiguous maximum min minimum multiple_of num_programs permute "
    "pointer_type program_id ravel reduce reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn static_assert "
    "static_range store sum swizzle2d tensor trans uint16 uint32 uint64 uint8 umulhi view where xor_sum zeros "
    "zeros_like div_rn range static_print device_print PropagateNan add sub mul const squeeze unsqueeze "
    "make_tensor_descriptor load_tensor_descriptor store_tensor_descriptor"
)
LIBDEVICE = _words(
    "abs acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh div_rn erf erfc erfinv exp exp10 exp2 "
    "expm1 fast_cosf fast_dividef fast_expf fast_log2f fast_logf fast_powf fast_sinf fast_tanf fdim finitef floor fma "
    "fmod hypot isfinited isinf isnan log log10 log1p log2 nearbyint normcdf pow remainder rint round rsqrt signbit "
    "sin sinh sqrt sqrt_rn tan tanh trunc"
)
METHODS = _words(
    "shape size stride numel contiguous is_contiguous dtype device data_ptr element_size ndim dim view reshape "
    "is_cuda new_empty new_zeros detach ravel expand t T transpose permute flatten unsqueeze squeeze to clone "
    "element_ty itemsize append items get broadcast_to trans value type nelement is_floating_point float half "
    "bfloat16 view_as expand_as get_device index ALL NONE is_floating requires_grad layout multi_processor_count "
    "is_complex "
    # Methods of Python's lists, dicts and numbers. No method of a tensor with one of these names computes anything.
    "insert extend pop remove reverse clear count copy keys values update setdefault bit_length is_integer"
)
# Methods of blocks, allowed only within kernels, because torch tensors have methods of these names that compute.
OF_BLOCKS = _words(
    "abs cast ceil cos erf exp exp2 floor load log log2 logical_and logical_or max min rsqrt sigmoid sin softmax sqrt "
    "sqrt_rn store sum"
)
BUILTINS = _words(
    "len range min max all any int float bool tuple list dict isinstance enumerate zip ValueError TypeError "
    "RuntimeError NotImplementedError AssertionError Exception True False None str abs round sum sorted reversed"
)
SHADOWED = _words("min max str abs round sum sorted reversed")  # built-in names that a function may define for itself
# Names that may be imported by themselves; a name that is also in PLAIN_CALLS may only be called, or decorate.
ALONE = {
    "triton": _words("cdiv next_power_of_2 jit autotune heuristics Config"),
    "math": MATH,
    **dict.fromkeys(LIBDEVICE_AT, LIBDEVICE),
}
# The only functions that may be taken from these modules.
ASKED_OF_GPUS = {
    "torch.cuda.synchronize", "torch.cuda.current_device", "torch.cuda.get_device_properties",
    "torch.cuda.is_available",
    ACTIVE_DEVICE := "triton.runtime.driver.active.get_active_torch_device",  # Triton's own tutorials begin with this
}  # fmt: skip
# Calls that could take a function or a file of the candidate's, or keep something that the candidate can change:
# (number of positional arguments, names of the other arguments).
PLAIN_CALLS: dict[str, tuple[int, frozenset[str]]] = {
    "triton.jit": (0, _words("noinline do_not_specialize do_not_specialize_on_alignment debug")),
    "triton.autotune": (2, _words("configs key restore_value reset_to_zero warmup rep use_cuda_graph cache_results")),
    "triton.heuristics": (1, _words("values")),
    "triton.Config": (4, _words("kwargs num_warps num_stages num_ctas maxnreg")),
    "print": (20, _words("sep end flush")),
}
# Torch functions that a run may call: to make outputs, inspect a tensor, or move it. Triton's interpreter adds the
# functions that wrap memory, Triton's tuner adds zero_, and torch.no_grad the last function.
ALLOWED_OPS = METHODS | {
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "full_like",
    "untyped_storage", "storage_offset", "__get__",
    "set_", "copy_", "cpu", "new_tensor", "__len__", "is_pinned", "nbytes", "untyped", "zero_",
    "_set_grad_enabled", "broadcast_tensors", "promote_types", "result_type",
}  # fmt: skip
