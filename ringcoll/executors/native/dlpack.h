/* DLPack's table of functions, of its version 1.3, by which a tensor is read without an object of
 * Python. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

enum { DL_MAJOR = 1, DL_CPU = 1, DL_COMPLEX = 5 };

typedef struct DLExchange {
    uint32_t major, minor;
    const struct DLExchange* before;
    void (*allocate)(void), (*managed)(void), (*to_object)(void); /* not called here */
    int (*tensor_of)(void* object, DLTensor* tensor);             /* NULL: there is none */
    int (*current_stream)(int32_t device_type, int32_t device, void** stream);
} DLExchange;

/* The table in a library's capsule; NULL: there is none that is known here. */
static const DLExchange* exchange_in(PyObject* capsule) {
    static const char* const name = "dlpack_exchange_api";
    const DLExchange* found =
        PyCapsule_IsValid(capsule, name) ? PyCapsule_GetPointer(capsule, name) : NULL;
    while (found != NULL && found->major != DL_MAJOR) found = found->before;
    return found;
}

/* Whether the elements lie side by side, and how many there are. */
static bool is_contiguous(const DLTensor* tensor, long long* size) {
    int64_t elements = 1;
    bool whole = true;
    for (int k = tensor->ndim - 1; k >= 0; k--) {
        if (tensor->shape[k] == 1) continue;
        if (tensor->strides == NULL || tensor->strides[k] != elements) whole = false;
        elements *= tensor->shape[k];
    }
    *size = elements;
    return whole && elements > 0;
}
