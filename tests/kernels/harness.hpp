// Types and operators over whole arrays, for ctypes. A generated source names what it exports.
#include <ops.cuh>

template <class To>
static const To* read(const void* memory) {
    return static_cast<const To*>(memory);
}

#define EXPORT_TYPE(T)                                                                  \
    extern "C" void widen_##T(const void* from, void* to, rc::u64 n) {                  \
        for (rc::u64 i = 0; i < n; ++i)                                                 \
            static_cast<rc::T::Acc*>(to)[i] = rc::T::widen(read<rc::T::Raw>(from)[i]);  \
    }                                                                                   \
    extern "C" void narrow_##T(const void* from, void* to, rc::u64 n) {                 \
        for (rc::u64 i = 0; i < n; ++i)                                                 \
            static_cast<rc::T::Raw*>(to)[i] = rc::T::narrow(read<rc::T::Acc>(from)[i]); \
    }                                                                                   \
    extern "C" rc::u32 raw_size_##T() { return sizeof(rc::T::Raw); }                    \
    extern "C" rc::u32 acc_size_##T() { return sizeof(rc::T::Acc); }                    \
    extern "C" rc::u32 wide_##T() { return rc::T::wide; }

#define EXPORT_OPERATOR(T, Op)                                                                     \
    extern "C" void load_##T##_##Op(const void* from, const void* factor, void* to, rc::u64 n) {   \
        for (rc::u64 i = 0; i < n; ++i)                                                            \
            static_cast<rc::T::Acc*>(to)[i] =                                                      \
                rc::Op<rc::T>::load(read<rc::T::Raw>(from)[i], *read<rc::T::Acc>(factor));         \
    }                                                                                              \
    extern "C" void combine_##T##_##Op(const void* left, const void* right, void* to, rc::u64 n) { \
        for (rc::u64 i = 0; i < n; ++i)                                                            \
            static_cast<rc::T::Acc*>(to)[i] =                                                      \
                rc::Op<rc::T>::combine(read<rc::T::Acc>(left)[i], read<rc::T::Acc>(right)[i]);     \
    }                                                                                              \
    extern "C" void finish_##T##_##Op(const void* from, rc::u32 nranks, void* to, rc::u64 n) {     \
        for (rc::u64 i = 0; i < n; ++i)                                                            \
            static_cast<rc::T::Acc*>(to)[i] =                                                      \
                rc::Op<rc::T>::finish(read<rc::T::Acc>(from)[i], nranks);                          \
    }
