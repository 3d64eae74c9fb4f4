/* Small calls of a CPU rank that have come before, from their arguments to their result.
 *
 * Python decides everything: what a call runs, and that it may run here, where it gives the rows of
 * both halves of SCRATCH. The code here does no more of a call than `CpuEngine.collective` and
 * `CpuExecutor.run` do of one that they know, in their order. It leaves to Python
 *
 * - what it does not know, or finds in another state than that of an idle rank: it returns False
 *   before a peer has seen anything of the call;
 * - waiting: where a flag has not come after some polls it hands the call over at that row;
 * - errors: where a peer has made another call it hands over at the end.
 *
 * Numpy's own loops do the arithmetic, so that the bits are those of the rows in Python. */

#include "entries.h"
#include "run.h"
#include "types.h"

/* Whether an operator is that of an entry, or are the counts of a call that has some: the same
 * objects, or equal ones of types whose comparison runs no Python. */
static bool is_same(PyObject* known, PyObject* given) {
    if (known == given) return true;
    if (Py_TYPE(known) != Py_TYPE(given)) return false;
    if (PyTuple_CheckExact(known)) {
        Py_ssize_t size = PyTuple_GET_SIZE(known);
        bool same = size == PyTuple_GET_SIZE(given);
        for (Py_ssize_t k = 0; same && k < size; k++)
            same = is_same(PyTuple_GET_ITEM(known, k), PyTuple_GET_ITEM(given, k));
        return same;
    }
    bool plain =
        PyLong_CheckExact(known) || PyUnicode_CheckExact(known) || PyBytes_CheckExact(known);
    return plain && PyObject_RichCompareBool(known, given, Py_EQ) == 1;
}

/* Whether options are the very objects of those of an entry: 1 is not True. */
static bool has_options(const Entry* entry, PyObject* how) {
    if (PyDict_GET_SIZE(how) != PyDict_GET_SIZE(entry->how)) return false;
    PyObject *option, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(how, &at, &option, &value)) /* other kinds of str may run Python */
        if (!PyUnicode_CheckExact(option) || PyDict_GetItemWithError(entry->how, option) != value)
            return false;
    return true;
}

/* Whether an argument is what an entry takes there, for so many units; its address and bytes. */
static bool fits(const Entry* entry, int at, PyObject* buffer, long long units, intptr_t* start,
                 npy_intp* nbytes) {
    *start = *nbytes = 0;
    if (entry->kinds[at] == NULL) return buffer == Py_None;
    if (!PyArray_CheckExact(buffer)) return false;
    PyArrayObject* array = (PyArrayObject*)buffer;
    npy_intp size = PyArray_SIZE(array);
    if (PyArray_DESCR(array) != entry->kinds[at] || size != entry->sizes[at] * units ||
        (PyArray_FLAGS(array) & FLAGS) != entry->flags[at])
        return false;
    *start = (intptr_t)PyArray_DATA(array);
    *nbytes = size * PyArray_ITEMSIZE(array);
    return true;
}

/* How many units of an entry its first array holds; 0: it serves no call of that size. */
static long long units_of(const Entry* entry, PyObject* const* buffers) {
    long long units = 1;
    for (int at = 0; at < 2; at++)
        if (entry->kinds[at] != NULL) {
            if (!PyArray_CheckExact(buffers[at])) return 0;
            units = PyArray_SIZE((PyArrayObject*)buffers[at]) / entry->sizes[at];
            break;
        }
    return units >= entry->first && units < entry->last ? units : 0;
}

/* Say of a call of so many units of an entry where its buffers lie, and its signature. */
static void describe(Call* call, Entry* entry, long long units, const intptr_t* starts) {
    intptr_t arguments[3] = {starts[0], starts[1], 0};
    call->entry = entry, call->units = units;
    call->count = entry->count < 0 ? units : entry->count;
    for (int k = 0; k < 2; k++) {
        const Place* place = &entry->places[k];
        call->bases[k] = arguments[place->base] + place->offset + place->stride * units;
    }
    call->bases[ABSOLUTE] = 0;
    long long width = (units + entry->align - 1) / entry->align * entry->align;
    call->slot = (width * entry->widest + 63) / 64 * 64; /* as slot_size of binding.py */
    uint64_t signature = entry->digest + (uint64_t)(entry->counted ? call->count : 0);
    call->signature = signature ? signature : 1; /* as signature_of of cpu_call.py */
}

/* Find the call of these arguments, whose entry the caller drops; false: there is none. */
static bool find(const Calls* self, PyObject* const* given, Call* call) {
    PyArray_Descr* kind =
        PyArray_CheckExact(given[1]) ? PyArray_DESCR((PyArrayObject*)given[1]) : NULL;
    if (!PyLong_CheckExact(given[4])) return false;
    int overflow;
    long root = PyLong_AsLongAndOverflow(given[4], &overflow);
    if (overflow) return false;
    Entry* entry = self->table[bucket_of(given[0], kind)];
    for (; entry != NULL; entry = entry->next) {
        intptr_t starts[2];
        npy_intp nbytes[2];
        if (entry->name != given[0] || entry->root != root) continue;
        long long units = units_of(entry, given + 1);
        if (units == 0 || !fits(entry, 0, given[1], units, &starts[0], &nbytes[0]) ||
            !fits(entry, 1, given[2], units, &starts[1], &nbytes[1]) ||
            !is_same(entry->op, given[3]) || !has_options(entry, given[5]))
            continue;
        /* Arguments that share memory are another call; where both are one, one that is known. */
        bool apart = starts[0] + nbytes[0] <= starts[1] || starts[1] + nbytes[1] <= starts[0];
        bool both = entry->kinds[0] != NULL && entry->kinds[1] != NULL;
        bool one = both && starts[0] == starts[1] && nbytes[0] == nbytes[1];
        if (entry->one ? !one : both && !apart) continue;
        describe(call, entry, units, starts);
        entry->refs++;
        return true;
    }
    return false;
}

/* Run a call if no other thread makes one: as run. */
static int locked(Calls* self, const Call* call) {
    PyObject* taken = PyObject_CallOneArg(self->owned[ACQUIRE], Py_False);
    if (taken == NULL) return -1;
    Py_DECREF(taken);
    if (taken != Py_True) return 0;
    self->running++;
    int made = run(self, call);
    self->running--;
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    if (made < 0) PyErr_Fetch(&type, &value, &trace);
    PyObject* released = PyObject_CallNoArgs(self->owned[RELEASE]);
    Py_XDECREF(released);
    if (made < 0) PyErr_Restore(type, value, trace);
    return released == NULL ? -1 : made;
}

/* (name, sendbuf, recvbuf, op, root, options, timeout or None) -> whether the call was made. */
static PyObject* calls_call(PyObject* object, PyObject* const* given, size_t nargsf,
                            PyObject* keywords) {
    Calls* self = (Calls*)object;
    if (PyVectorcall_NARGS(nargsf) != 7 || keywords != NULL || !PyDict_CheckExact(given[5])) {
        PyErr_SetString(PyExc_TypeError,
                        "wanted name, sendbuf, recvbuf, op, root, a dict and a timeout");
        return NULL;
    }
    Call call;
    if (!find(self, given, &call)) Py_RETURN_FALSE;
    call.timeout = given[6] == Py_None ? call.entry->timeout : given[6];
    int made = PySet_GET_SIZE(self->owned[GROUPS]) ? 0 : locked(self, &call);
    drop(call.entry);
    let_go(self);
    return made < 0 ? NULL : PyBool_FromLong(made);
}

/* -- the type ---------------------------------------------------------------------------------- */

static void calls_dealloc(Calls* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(calls_close(self, NULL));
    PyMem_Free(self->views);
    for (size_t k = 0; k < OWNED; k++) Py_XDECREF(self->owned[k]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject* calls_new(PyTypeObject* type, PyObject* given, PyObject* Py_UNUSED(keywords)) {
    PyObject *owned[OWNED], *alarm, *words;
    int rank, spins, yields;
    Py_ssize_t entered, signatures[SLOTS];
    if (!PyArg_ParseTuple(given, "OOOOOO!OO!OO!iiin(nnnn)", &owned[STATE], &owned[HOST],
                          &owned[FABRIC], &owned[ACQUIRE], &owned[RELEASE], &PySet_Type,
                          &owned[GROUPS], &owned[RESUME], &PyList_Type, &owned[NUMBERS], &alarm,
                          &PyTuple_Type, &words, &rank, &spins, &yields, &entered, &signatures[0],
                          &signatures[1], &signatures[2], &signatures[3]))
        return NULL;
    Calls* self = (Calls*)type->tp_alloc(type, 0); /* all zero */
    if (self == NULL) return NULL;
    self->vectorcall = calls_call;
    for (size_t k = 0; k < OWNED; k++) self->owned[k] = Py_NewRef(owned[k]);
    self->rank = rank, self->spins = spins, self->yields = yields, self->entered = entered;
    memcpy(self->signatures, signatures, sizeof signatures);
    self->views = PyMem_Calloc((size_t)PyTuple_GET_SIZE(words) + 1, sizeof *self->views);
    if (self->views == NULL)
        PyErr_NoMemory();
    else if (PyObject_GetBuffer(alarm, &self->alarm, PyBUF_CONTIG | PyBUF_FORMAT) == 0) {
        for (; self->nranks < PyTuple_GET_SIZE(words); self->nranks++)
            if (PyObject_GetBuffer(PyTuple_GET_ITEM(words, self->nranks),
                                   &self->views[self->nranks], PyBUF_CONTIG | PyBUF_FORMAT) < 0)
                break;
        if (self->nranks == PyTuple_GET_SIZE(words)) return (PyObject*)self;
    }
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)calls_add, METH_VARARGS, "Take a call that may run here from now on."},
    {"clear", (PyCFunction)calls_clear, METH_NOARGS, "Forget all calls."},
    {"close", (PyCFunction)calls_close, METH_NOARGS, "Forget all calls, and let go of memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Calls, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The calls of one rank that have come before."},
    {Py_tp_new, calls_new},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "ringcoll.executors.cpu._small_calls.Calls",     sizeof(Calls), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_small_calls",
    "Small calls that have come before.",
    -1,
    NULL,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__small_calls(void) {
    import_array();
    import_umath();
#define INTERN(name)                              \
    s_##name = PyUnicode_InternFromString(#name); \
    if (s_##name == NULL) return NULL;
    NAMES(INTERN)
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made == NULL || type == NULL || PyModule_AddObjectRef(made, "Calls", type) < 0 ||
        PyModule_AddIntMacro(made, SMALL) < 0 || PyModule_AddIntMacro(made, INTERFACE) < 0)
        Py_CLEAR(made);
    Py_XDECREF(type);
    return made;
}
