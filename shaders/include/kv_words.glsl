// How many dims a word of the KV cache holds (xinfer_vk/kernels/kv.py). Before it is included: KV_F32, KV_F16, KV_Q8_0
// or KV_Q4_0.
#if defined(KV_Q8_0) || defined(KV_Q4_0)
#define QUANTIZED
#endif
#if defined(KV_Q4_0)
const uint WORD_DIMS = 8u;
#elif defined(KV_Q8_0)
const uint WORD_DIMS = 4u;
#elif defined(KV_F16)
const uint WORD_DIMS = 2u;
#else
const uint WORD_DIMS = 1u;
#endif
