/* Small calls of a CPU rank that have come before, from their arguments to their result.
 *
 * Python decides everything: what a call runs, and that it may run here, where it gives the rows of
 * both halves of SCRATCH, or the landings of messages. The code here does no more of a call than
 * `CpuEngine.collective` and `CpuExecutor.run` do of one that they know, in their order, and of
 * messages, alone or of a group, than `Progress.issue` or `run_exchange`. It leaves to Python
 *
 * - what it does not know, or finds in another state than that of an idle rank: it returns False
 *   before a peer has seen anything of the call;
 * - waiting: where a flag has not come after some polls it hands the call over at that row, or
 *   those of its messages that have not moved; where nobody waits for these yet, it keeps them
 *   until a thread does so, or Python takes them over;
 * - errors: where a peer has made another call it hands over at the end.
 *
 * Numpy's own loops do the arithmetic, so that the bits are those of the rows in Python. */

#include "entries.h"
#include "exchanges.h"
#include "match.h"
#include "run.h"
#include "tensors.h"
#include "types.h"

/* How many units of an entry its first array holds; 0: it serves no call of that size. */
static long long units_of(const Entry* entry, PyObject* const* buffers) {
    long long units = 1;
    for (int at = 0; at < 2; at++)
        if (entry->shape.kinds[at] != NULL) {
            if (!PyArray_CheckExact(buffers[at])) return 0;
            units = PyArray_SIZE((PyArrayObject*)buffers[at]) / entry->shape.sizes[at];
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
        if (entry->shape.name != given[0] || entry->root != root) continue;
        long long units = units_of(entry, given + 1);
        if (units == 0 || !fits(&entry->shape, 0, given[1], units, &starts[0], &nbytes[0]) ||
            !fits(&entry->shape, 1, given[2], units, &starts[1], &nbytes[1]) ||
            !is_same(entry->shape.op, given[3]) || !has_options(&entry->shape, given[5]))
            continue;
        /* Arguments that share memory are another call; where both are one, one that is known. */
        bool apart = starts[0] + nbytes[0] <= starts[1] || starts[1] + nbytes[1] <= starts[0];
        bool both = entry->shape.kinds[0] != NULL && entry->shape.kinds[1] != NULL;
        bool one = both && starts[0] == starts[1] && nbytes[0] == nbytes[1];
        if (entry->one ? !one : both && !apart) continue;
        describe(call, entry, units, starts);
        entry->refs++;
        return true;
    }
    return false;
}

/* Take a lock of the rank if no other thread has it: 1, 0 or -1. */
static int take(Calls* self, int lock) {
    PyObject* taken = PyObject_CallOneArg(self->acquire[lock], Py_False);
    if (taken == NULL) return -1;
    Py_DECREF(taken);
    if (taken != Py_True) return 0;
    self->running++;
    return 1;
}

/* Give it back, whether an exception is raised or not: 0, or -1. */
static int give_back(Calls* self, int lock) {
    PyObject *type, *value, *trace;
    self->running--;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* released = PyObject_CallNoArgs(self->release[lock]);
    if (released == NULL) {
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
        return -1;
    }
    Py_DECREF(released);
    PyErr_Restore(type, value, trace);
    return 0;
}

/* Run a call if no other thread makes one: as run. */
static int locked(Calls* self, Call* call) {
    int taken = take(self, VECTOR);
    if (taken != 1) return taken;
    int made = run(self, call);
    return give_back(self, VECTOR) < 0 ? -1 : made;
}

/* Make the call of these arguments, if it is known: 1, 0 or -1; the caller drops its entry. */
static int make(Calls* self, PyObject* const* given, Py_ssize_t nargs, Call* call) {
    if (nargs != 7 || !PyDict_CheckExact(given[5])) {
        PyErr_SetString(PyExc_TypeError,
                        "wanted name, sendbuf, recvbuf, op, root, a dict and a timeout");
        return -1;
    }
    if (!find(self, given, call)) return 0;
    call->timeout = given[6] == Py_None ? call->entry->timeout : given[6];
    return PySet_GET_SIZE(self->owned[GROUPS]) ? 0 : locked(self, call);
}

/* (name, sendbuf, recvbuf, op, root, options, timeout or None) -> whether the call was made. */
static PyObject* calls_call(PyObject* object, PyObject* const* given, size_t nargsf,
                            PyObject* keywords) {
    Calls* self = (Calls*)object;
    Call call = {NULL};
    int made = make(self, given, keywords == NULL ? PyVectorcall_NARGS(nargsf) : -1, &call);
    if (call.entry != NULL) drop(call.entry);
    let_go(self);
    return made < 0 ? NULL : PyBool_FromLong(made);
}

/* The same of a call that nobody waits for -> None, where Python is to make it, or its ActiveCall,
 * its addresses and count, and None or what is left of it. */
static PyObject* calls_start(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    Call call = {.later = true};
    int made = make(self, given, nargs, &call);
    PyObject* started = made < 0 ? NULL : Py_NewRef(Py_None);
    if (made == 1) {
        PyObject* rest = call.rest == NULL ? Py_None : call.rest;
        Py_SETREF(started, Py_BuildValue("O(nniiL)O", call.active, (Py_ssize_t)call.bases[FIRST],
                                         (Py_ssize_t)call.bases[SECOND], 0, 0, call.count, rest));
    }
    Py_XDECREF(call.rest);
    if (call.entry != NULL) drop(call.entry);
    let_go(self);
    return started;
}

/* Make the messages that have been found, where `found`, under the lock of their context; with a
 * work nobody waits for them. */
static PyObject* exchange(Calls* self, Sending* sending, bool found, PyObject* timeout,
                          PyObject* work) {
    int lock = sending->nparts ? sending->parts[0].exchange->context : MESSAGES;
    int taken = !found || PySet_GET_SIZE(self->owned[GROUPS]) ? 0 : take(self, lock);
    PyObject* made = taken < 0 ? NULL : Py_NewRef(Py_False);
    if (taken == 1) {
        Py_SETREF(made, make_messages(self, sending, timeout, work));
        if (give_back(self, lock) < 0) Py_CLEAR(made);
    }
    for (int at = 0; at < sending->nparts; at++) drop_exchange(sending->parts[at].exchange);
    let_go(self);
    return made;
}

/* Find and make the messages of these arguments, see below. */
static PyObject* exchange_given(Calls* self, PyObject* const* given, PyObject* work) {
    Sending sending;
    sending.nparts = sending.nmessages = 0;
    bool found = find_exchange(self, PyLong_AsLong(given[0]), given + 1, &sending);
    return exchange(self, &sending, found, given[6], work);
}

/* (context, name, sendbuf, recvbuf, ends or counts, options, timeout or None) -> whether the
 * messages were made; or what Python has made of those that have to be waited for. */
static PyObject* calls_exchange(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    if (nargs != 7 || !PyLong_CheckExact(given[0]) || !PyDict_CheckExact(given[5])) {
        PyErr_SetString(PyExc_TypeError,
                        "wanted context, name, sendbuf, recvbuf, ends, a dict and a timeout");
        return NULL;
    }
    return exchange_given(self, given, NULL);
}

/* The same arguments and a MessageWork -> whether messages were entered that nobody waits for. */
static PyObject* calls_post(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    if (nargs != 8 || !PyLong_CheckExact(given[0]) || !PyDict_CheckExact(given[5])) {
        PyErr_SetString(PyExc_TypeError,
                        "wanted context, name, sendbuf, recvbuf, ends, a dict, a timeout, a work");
        return NULL;
    }
    return exchange_given(self, given, given[7]);
}

/* (MessageWork, whether to wait) -> whether its messages have ended; False: Python is to wait. */
static PyObject* calls_finish(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "wanted a work, and whether to wait for it");
        return NULL;
    }
    int ended = take(self, MESSAGES);
    if (ended == 1) {
        ended = await_pending(self, given[0], given[1] == Py_True);
        if (give_back(self, MESSAGES) < 0) ended = -1;
    }
    let_go(self);
    return ended < 0 ? NULL : PyBool_FromLong(ended);
}

/* (context, name, sendbuf, recvbuf, ends, options) -> the Exchange that Python keeps of messages
 * that would be made here, or None. */
static PyObject* calls_known(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    if (nargs != 6 || !PyLong_CheckExact(given[0]) || !PyDict_CheckExact(given[5])) {
        PyErr_SetString(PyExc_TypeError, "wanted context, name, sendbuf, recvbuf, ends and a dict");
        return NULL;
    }
    Sending sending;
    sending.nparts = sending.nmessages = 0;
    if (!find_exchange(self, PyLong_AsLong(given[0]), given + 1, &sending)) Py_RETURN_NONE;
    PyObject* kept = Py_NewRef(sending.parts[0].exchange->kept);
    drop_exchange(sending.parts[0].exchange);
    return kept;
}

/* (calls, timeout or None) -> as exchange, of the messages of a group, of which nobody has a Work;
 * each is a tuple of name, sendbuf, recvbuf, ends and options. */
static PyObject* calls_exchange_group(Calls* self, PyObject* const* given, Py_ssize_t nargs) {
    bool found = nargs == 2 && PyTuple_CheckExact(given[0]) && PyTuple_GET_SIZE(given[0]) > 0;
    Py_ssize_t ncalls = found ? PyTuple_GET_SIZE(given[0]) : 0;
    for (Py_ssize_t k = 0; k < ncalls; k++) {
        PyObject* call = PyTuple_GET_ITEM(given[0], k);
        if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != 5 ||
            !PyDict_CheckExact(PyTuple_GET_ITEM(call, 4)))
            found = false;
    }
    if (!found) {
        PyErr_SetString(PyExc_TypeError,
                        "wanted tuples of name, sendbuf, recvbuf, ends and a dict, and a timeout");
        return NULL;
    }
    Sending sending;
    sending.nparts = sending.nmessages = 0;
    for (Py_ssize_t k = 0; found && k < ncalls; k++) {
        PyObject* const* call = ((PyTupleObject*)PyTuple_GET_ITEM(given[0], k))->ob_item;
        found = find_exchange(self, MESSAGES, call, &sending);
        if (found) found = !sending.parts[sending.nparts - 1].exchange->later;
    }
    return exchange(self, &sending, found, given[1], NULL);
}

/* -- the type ---------------------------------------------------------------------------------- */

static void calls_dealloc(Calls* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(calls_close(self, NULL));
    PyMem_Free(self->views);
    for (size_t k = 0; k < OWNED; k++) Py_XDECREF(self->owned[k]);
    for (int k = 0; k < CONTEXTS; k++) {
        const Context* context = &self->contexts[k];
        Py_XDECREF(self->acquire[k]), Py_XDECREF(self->release[k]);
        Py_XDECREF(context->pairs), Py_XDECREF(context->epochs), Py_XDECREF(context->go_on);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* Read what moves the messages of a context: lock's methods, Pairs, its epochs, and go_on. */
static int read_context(Calls* self, int at, PyObject* given) {
    PyObject *acquire, *release, *pairs, *epochs, *go_on;
    if (!PyArg_ParseTuple(given, "OOOO!O", &acquire, &release, &pairs, &PyDict_Type, &epochs,
                          &go_on))
        return -1;
    self->acquire[at] = Py_NewRef(acquire), self->release[at] = Py_NewRef(release);
    self->contexts[at] = (Context){Py_NewRef(pairs), Py_NewRef(epochs), Py_NewRef(go_on)};
    return 0;
}

static PyObject* calls_new(PyTypeObject* type, PyObject* given, PyObject* Py_UNUSED(keywords)) {
    PyObject *owned[OWNED], *contexts[CONTEXTS], *alarm, *words;
    int rank, spins, yields;
    Py_ssize_t entered, signatures[SLOTS];
    if (!PyArg_ParseTuple(given, "OOOO!OOO!OO!(OO)OO!iiin(nnnn)", &owned[STATE], &owned[HOST],
                          &owned[FABRIC], &PySet_Type, &owned[GROUPS], &owned[RESUME], &owned[REST],
                          &PyList_Type, &owned[NUMBERS], &owned[PROGRESS], &PyList_Type,
                          &owned[ENTERED], &contexts[MESSAGES], &contexts[VECTOR], &alarm,
                          &PyTuple_Type, &words, &rank, &spins, &yields, &entered, &signatures[0],
                          &signatures[1], &signatures[2], &signatures[3]))
        return NULL;
    Calls* self = (Calls*)type->tp_alloc(type, 0); /* all zero */
    if (self == NULL) return NULL;
    self->vectorcall = calls_call;
    for (size_t k = 0; k < OWNED; k++) self->owned[k] = Py_NewRef(owned[k]);
    for (int k = 0; k < CONTEXTS; k++)
        if (read_context(self, k, contexts[k]) < 0) {
            Py_DECREF(self);
            return NULL;
        }
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
    {"add_exchange", (PyCFunction)calls_add_exchange, METH_VARARGS, "Take sends and receives."},
    {"exchange", (PyCFunction)(void (*)(void))calls_exchange, METH_FASTCALL, "Make them."},
    {"post", (PyCFunction)(void (*)(void))calls_post, METH_FASTCALL, "Enter them."},
    {"finish", (PyCFunction)(void (*)(void))calls_finish, METH_FASTCALL, "Wait for them."},
    {"known", (PyCFunction)(void (*)(void))calls_known, METH_FASTCALL, "What is kept of them."},
    {"exchange_group", (PyCFunction)(void (*)(void))calls_exchange_group, METH_FASTCALL,
     "Make those of a group."},
    {"start", (PyCFunction)(void (*)(void))calls_start, METH_FASTCALL, "Start a call."},
    {"clear", (PyCFunction)calls_clear, METH_NOARGS, "Forget all calls."},
    {"close", (PyCFunction)calls_close, METH_NOARGS, "Forget all calls, and let go of memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"lost", T_BOOL, offsetof(Calls, lost), READONLY, NULL},
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
#define INTERN_TENSOR_NAME(name)                  \
    t_##name = PyUnicode_InternFromString(#name); \
    if (t_##name == NULL) return NULL;
    TENSOR_NAMES(INTERN_TENSOR_NAME)
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    PyObject* reader = PyType_FromSpec(&reader_spec);
    pending_type = (PyTypeObject*)PyType_FromSpec(&pending_spec);
    if (made == NULL || type == NULL || pending_type == NULL || reader == NULL ||
        PyModule_AddObjectRef(made, "Calls", type) < 0 ||
        PyModule_AddObjectRef(made, "TensorReader", reader) < 0 ||
        PyModule_AddIntMacro(made, SMALL) < 0 || PyModule_AddIntMacro(made, MOST) < 0 ||
        PyModule_AddIntMacro(made, INTERFACE) < 0)
        Py_CLEAR(made);
    Py_XDECREF(type), Py_XDECREF(reader);
    return made;
}
