/* Calls of a GPU rank that were launched before, from their arguments to the driver.
 *
 * Python decides everything: what a call runs, how it is prepared, and that it may be launched
 * here, where it gives the call with its arguments. The code here does no more of a call than
 * `CudaEngine.collective` and `FastPath.launch` do of one that they know, in their order, and
 * leaves to Python what it does not know, or finds in another state than that of the last call: it
 * returns False before anything is done. */

#include "../../native/same.h"
#include "arrays.h"
#include "launch.h"
#include "names.h"
#include "types.h"

/* -- the table --------------------------------------------------------------------------------- */

static void drop(Entry* entry) {
    if (--entry->refs > 0) return;
    Py_CLEAR(entry->name);
    Py_CLEAR(entry->op);
    for (int k = 0; k < 2; k++) Py_CLEAR(entry->dtypes[k]);
    Py_CLEAR(entry->prepared);
    Py_CLEAR(entry->launchable);
    Py_CLEAR(entry->parameter);
    PyMem_Free(entry->fills);
    PyMem_Free(entry);
}

/* Where the table has the calls of a name on arrays of such sizes. */
static size_t bucket_of(PyObject* name, const Reading* arguments) {
    uint64_t hash =
        (uintptr_t)name >> 4 ^ (uint64_t)arguments[0].size * 31 ^ (uint64_t)arguments[1].size * 17;
    return (hash ^ hash >> 8 ^ hash >> 16 ^ hash >> 24) % BUCKETS;
}

/* Whether arguments that lie like these are those of an entry: apart, or where they share memory at
 * the same distance. */
static bool lies_alike(const Entry* entry, const Reading* arguments) {
    intptr_t distance;
    bool shared = is_shared(arguments, entry->nbytes, &distance);
    return alignment_of(arguments) == entry->alignment && shared == entry->shared &&
           (!shared || distance == entry->distance);
}

static bool is_like(const Reading* known, const Reading* given) {
    return known->library == given->library && known->size == given->size &&
           known->kind == given->kind;
}

/* Find the entry of these arguments, (name, sendbuf, recvbuf, op, root), or NULL. */
static Entry** find(Launches* self, PyObject* const* given, const Reading* arguments) {
    long root;
    if (!read_root(given[4], &root)) return NULL;
    Entry** at = &self->table[bucket_of(given[0], arguments)];
    for (; *at != NULL; at = &(*at)->next) {
        Entry* entry = *at;
        if (entry->name == given[0] && entry->root == root &&
            is_like(&entry->arguments[0], &arguments[0]) &&
            is_like(&entry->arguments[1], &arguments[1]) && is_same(entry->op, given[3]) &&
            lies_alike(entry, arguments))
            return at;
    }
    return NULL;
}

/* -- a call ------------------------------------------------------------------------------------ */

/* Whether the stream of the last call is kept alive by this alone: 1, 0 or -1. */
static int is_kept(const Launches* self, PyObject* stream, PyObject* owner) {
    PyObject* owners = get(self->owned[OWNERS], &n_now);
    if (owners == NULL) return -1;
    int kept = 0;
    if (PyDict_CheckExact(owners) && PyDict_GET_SIZE(owners) == 1) {
        PyObject* found = PyDict_GetItemWithError(owners, stream);
        kept = found != NULL ? found == owner : PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(owners);
    return kept;
}

/* Make a call on arguments that lie there, INPUT and OUTPUT in these: as launch. */
static int make_on(Launches* self, Call* call, const Reading* arguments, const int* bases,
                   const Py_ssize_t* offsets) {
    PyObject* owner = NULL;
    const Library* library =
        arguments[0].library != NULL ? arguments[0].library : arguments[1].library;
    call->stream = stream_of(self, library, &owner);
    int made = call->stream == NULL ? -1 : is_kept(self, call->stream, owner);
    uintptr_t starts[3] = {arguments[0].start, arguments[1].start, 0};
    for (int k = 0; k < 2; k++) call->starts[k] = starts[bases[k]] + (uintptr_t)offsets[k];
    PyObject* prepared = NULL;
    if (made == 1 && call->placed != NULL) {
        /* First: what was begun and not launched Python would count, and record, once more. */
        made = is_plain(self, NULL, call->stream);
        if (made == 1) made = begin(call->placed, &prepared);
        call->prepared = prepared;
    }
    if (made == 1) made = launch(self, call);
    Py_XDECREF(prepared);
    Py_XDECREF(call->stream);
    Py_XDECREF(owner);
    return made;
}

/* Make a call that is known: as launch. */
static int make_known(Launches* self, Entry* entry, const Reading* arguments) {
    Call call = {.prepared = entry->prepared, .launchable = entry->launchable, .entry = entry};
    entry->refs++;
    int made = make_on(self, &call, arguments, entry->bases, entry->offsets);
    drop(entry);
    return made;
}

/* Make a call of a known kind whose count has not come often: as launch. */
static int make_new(Launches* self, PyObject* const* given, const Reading* arguments) {
    Placed placed;
    if (!find_like(self, given, arguments, &placed)) return 0;
    const long long* each = placed.like->offsets;
    Py_ssize_t offsets[2] = {(Py_ssize_t)(each[0] * placed.count),
                             (Py_ssize_t)(each[1] * placed.count)};
    Call call = {.launchable = placed.like->launchable, .placed = &placed};
    placed.like->refs++;
    int made = make_on(self, &call, arguments, placed.like->bases, offsets);
    drop_like(placed.like);
    return made;
}

/* (name, sendbuf, recvbuf, op, root) -> whether the call was made. */
static PyObject* launches_call(PyObject* object, PyObject* const* given, size_t nargsf,
                               PyObject* keywords) {
    Launches* self = (Launches*)object;
    if (PyVectorcall_NARGS(nargsf) != 5 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "wanted name, sendbuf, recvbuf, op and root");
        return NULL;
    }
    Reading arguments[2];
    int made = self->owned[RANK] == NULL ? 0 : read_both(self, given + 1, arguments);
    if (made == 1) {
        Entry** found = find(self, given, arguments);
        if (PySet_GET_SIZE(self->owned[GROUPS]) != 0)
            made = 0;
        else if (found != NULL)
            made = make_known(self, *found, arguments);
        else
            made = make_new(self, given, arguments);
    }
    return made < 0 ? NULL : PyBool_FromLong(made);
}

/* (prepared, stream, addresses[, behind]) -> whether it was enqueued: FastPath.launch. */
static PyObject* launches_launch(Launches* self, PyObject* const* given, Py_ssize_t nargs) {
    PyObject* behind = nargs == 4 && given[3] != Py_None ? given[3] : NULL;
    if (nargs < 3 || nargs > 4 || !PyLong_Check(given[1]) || !PyTuple_CheckExact(given[2]) ||
        (behind != NULL && !PyTuple_CheckExact(behind))) {
        PyErr_SetString(PyExc_TypeError, "wanted a prepared call, a stream and a tuple or two");
        return NULL;
    }
    PyObject* launchable = get(given[0], &n_kernel);
    if (launchable == NULL) return NULL;
    int made = 0;
    if (launchable != Py_None && self->owned[RANK] != NULL) {
        Call call = {given[0], launchable, given[1], NULL, NULL, {0}, given[2], behind};
        made = launch(self, &call);
    }
    Py_DECREF(launchable);
    return made < 0 ? NULL : PyBool_FromLong(made);
}

/* -- what Python gives ------------------------------------------------------------------------- */

/* Read where the words of a parameter hold the addresses of a launch. */
static int read_fills(Entry* entry) {
    long long address;
    PyObject* words = get(entry->parameter, &n_words);
    PyObject* flat = words == NULL ? NULL : get(entry->parameter, &n_flat);
    Py_ssize_t size = flat == NULL ? -1 : PyObject_Size(words);
    if (size >= 0 && !PyTuple_Check(flat)) PyErr_SetString(PyExc_TypeError, "wanted a tuple");
    if (size >= 0 && !PyErr_Occurred() && number_of(entry->parameter, &n_address, &address) == 0) {
        Py_ssize_t nfills = PyTuple_GET_SIZE(flat);
        entry->words = (uint64_t*)(uintptr_t)address;
        entry->fills = PyMem_Calloc((size_t)nfills + 1, sizeof *entry->fills);
        if (entry->fills == NULL) PyErr_NoMemory();
        for (Py_ssize_t k = 0; k < nfills && !PyErr_Occurred(); k++) {
            Fill* fill = &entry->fills[entry->nfills++];
            long long offset;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(flat, k), "niL", &fill->word, &fill->number,
                                  &offset))
                break;
            fill->offset = (uint64_t)offset;
            if (fill->word < 0 || fill->word >= size || fill->number < 0 || fill->number >= GIVEN)
                PyErr_SetString(PyExc_IndexError, "no such word");
        }
    }
    Py_XDECREF(words);
    Py_XDECREF(flat);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read of a prepared call what its launch takes. */
static int read_prepared(const Launches* self, Entry* entry, PyObject* prepared) {
    entry->prepared = Py_NewRef(prepared);
    entry->launchable = get(prepared, &n_kernel);
    if (entry->launchable == NULL || read_kernel(self, entry->launchable, &entry->kernel) < 0)
        return -1;
    entry->parameter = get(entry->launchable, &n_parameter);
    return entry->parameter == NULL ? -1 : read_fills(entry);
}

/* Read the arguments by which an entry is found. */
static int read_arguments(Entry* entry, PyObject* const* given, const Reading* arguments) {
    entry->name = Py_NewRef(given[0]), entry->op = Py_NewRef(given[3]);
    entry->alignment = alignment_of(arguments);
    entry->shared = is_shared(arguments, entry->nbytes, &entry->distance);
    for (int k = 0; k < 2; k++) {
        entry->arguments[k] = arguments[k];
        if (arguments[k].library == NULL || arguments[k].library->reader == DLPACK) continue;
        entry->dtypes[k] = get(given[1 + k], &n_dtype);
        if (entry->dtypes[k] == NULL) return -1;
        entry->arguments[k].kind = (uintptr_t)entry->dtypes[k];
    }
    return 0;
}

/* (name, sendbuf, recvbuf, op, root, prepared, places of both buffers, bytes of both arguments):
 * take a call that was launched before, in place of one with these arguments. */
static PyObject* launches_add(Launches* self, PyObject* args) {
    PyObject *given[5], *prepared;
    int bases[2];
    Py_ssize_t offsets[2], nbytes[2];
    Reading arguments[2];
    if (!PyArg_ParseTuple(args, "OOOOOO(inin)(nn)", &given[0], &given[1], &given[2], &given[3],
                          &given[4], &prepared, &bases[0], &offsets[0], &bases[1], &offsets[1],
                          &nbytes[0], &nbytes[1]))
        return NULL;
    int taken = read_both(self, given + 1, arguments);
    if (taken < 0) return NULL;
    long root;
    if (taken == 0 || !read_root(given[4], &root)) Py_RETURN_NONE;
    for (int k = 0; k < 2; k++)
        if (bases[k] < 0 || bases[k] > 2) {
            PyErr_SetString(PyExc_ValueError, "no such argument");
            return NULL;
        }
    Entry* entry = PyMem_Calloc(1, sizeof *entry);
    if (entry == NULL) return PyErr_NoMemory();
    entry->refs = 1, entry->root = root;
    for (int k = 0; k < 2; k++)
        entry->bases[k] = bases[k], entry->offsets[k] = offsets[k], entry->nbytes[k] = nbytes[k];
    if (read_arguments(entry, given, arguments) < 0 || read_prepared(self, entry, prepared) < 0) {
        drop(entry);
        return NULL;
    }
    Entry** at = find(self, given, arguments);
    bool replaces = at != NULL;
    if (!replaces) at = &self->table[bucket_of(given[0], arguments)];
    Entry* before = *at;
    entry->next = replaces ? before->next : before;
    *at = entry;
    self->size += !replaces;
    if (replaces) drop(before);
    Py_RETURN_NONE;
}

/* Read of a call what those of other counts have alike: as launches_add_like. */
static int read_like(const Launches* self, PyObject* args, PyObject** given, Like* like) {
    PyObject *begin, *launchable, *table;
    Py_ssize_t nbytes[2];
    long long count;
    Reading arguments[2];
    if (!PyArg_ParseTuple(
            args, "OOOOO(nn)L(LLLLL)(iLiL)OO(nnnn)KO!", &given[0], &given[1], &given[2], &given[3],
            &given[4], &nbytes[0], &nbytes[1], &count, &like->first, &like->last, &like->low,
            &like->high, &like->each, &like->bases[0], &like->offsets[0], &like->bases[1],
            &like->offsets[1], &begin, &launchable, &like->packs_at, &like->signature_at,
            &like->number_at, &like->timeout_at, &like->timeout, &PyTuple_Type, &table))
        return -1;
    int taken = read_both(self, given + 1, arguments);
    if (taken != 1) return taken;
    if (!read_root(given[4], &like->root) || count < 1) return 0;
    like->begin = Py_NewRef(begin), like->launchable = Py_NewRef(launchable);
    if (read_shape(like, given, arguments, nbytes, count) < 0 ||
        read_kernel(self, launchable, &like->kernel) < 0 || read_parameter(like) < 0 ||
        read_table(like, table) < 0)
        return -1;
    for (int k = 0; k < 2; k++)
        if (like->bases[k] < 0 || like->bases[k] > 2) {
            PyErr_SetString(PyExc_ValueError, "no such argument");
            return -1;
        }
    return 1;
}

/* (name, sendbuf, recvbuf, op, root, bytes of both arguments, count, counts and bytes for which the
 * kernel runs such calls and the bytes of one, the argument of INPUT, and
 * where it lies in it for one of the count, the same of OUTPUT, Recounter.begin_new, what is
 * launched, its words for packs, signature, number and timeout, the timeout, LLRecounts.table):
 * launch calls like this one of counts that have not come often; False: they are known. */
static PyObject* launches_add_like(Launches* self, PyObject* args) {
    PyObject* given[5];
    Like* like = PyMem_Calloc(1, sizeof *like);
    if (like == NULL) return PyErr_NoMemory();
    like->refs = 1;
    int taken = read_like(self, args, given, like);
    bool known = false;
    Like** at = taken == 1 ? likes_of(self, given[0]) : NULL;
    for (Like* before = taken == 1 ? *at : NULL; before != NULL; before = before->next)
        if (before->launchable == like->launchable && is_one_kind(before, like)) known = true;
    if (taken == 1 && !known) {
        like->next = *at, *at = like;
        self->nlikes++;
    } else {
        drop_like(like);
    }
    return taken < 0 ? NULL : PyBool_FromLong(!known);
}

/* Read DLPack's table of functions; false: there is none that is known here. */
static bool read_exchange(Library* library, PyObject* capsule) {
    const DLExchange* found = exchange_in(capsule);
    if (found == NULL || found->tensor_of == NULL || found->current_stream == NULL) return false;
    library->exchange = found;
    return true;
}

/* (type, reader, DLPack's table or None, owner of streams) -> whether its arrays are read here. */
static PyObject* launches_learn(Launches* self, PyObject* args) {
    PyObject *type, *capsule, *owner;
    int reader;
    if (!PyArg_ParseTuple(args, "O!iOO", &PyType_Type, &type, &reader, &capsule, &owner))
        return NULL;
    if (reader < 0 || reader >= READERS) {
        PyErr_SetString(PyExc_ValueError, "no such reader");
        return NULL;
    }
    if (self->nlibraries == LIBRARIES) Py_RETURN_FALSE;
    Library library = {.type = (PyTypeObject*)type, .reader = reader, .owner = owner};
    if (reader == DLPACK && !read_exchange(&library, capsule)) Py_RETURN_FALSE;
    Py_INCREF(type);
    Py_INCREF(owner);
    self->libraries[self->nlibraries++] = library;
    Py_RETURN_TRUE;
}

static PyObject* launches_clear(Launches* self, PyObject* Py_UNUSED(none)) {
    for (int k = 0; k < BUCKETS; k++) {
        while (self->table[k] != NULL) {
            Entry* entry = self->table[k];
            self->table[k] = entry->next;
            self->size--;
            drop(entry);
        }
        while (self->likes[k] != NULL) {
            Like* like = self->likes[k];
            self->likes[k] = like->next;
            self->nlikes--;
            drop_like(like);
        }
    }
    Py_RETURN_NONE;
}

/* -- the type ---------------------------------------------------------------------------------- */

/* Python's collector: a stream or an operator of the user's may lead back to the communicator. */
static int launches_traverse(Launches* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    for (int k = 0; k < OWNED; k++) Py_VISIT(self->owned[k]);
    for (int k = 0; k < self->nlibraries; k++) {
        Py_VISIT(self->libraries[k].type);
        Py_VISIT(self->libraries[k].owner);
    }
    for (int k = 0; k < BUCKETS; k++) {
        for (Entry* entry = self->table[k]; entry != NULL; entry = entry->next) {
            Py_VISIT(entry->op);
            Py_VISIT(entry->prepared);
            Py_VISIT(entry->launchable);
            Py_VISIT(entry->parameter);
        }
        for (Like* like = self->likes[k]; like != NULL; like = like->next) {
            Py_VISIT(like->op);
            Py_VISIT(like->begin);
            Py_VISIT(like->launchable);
        }
    }
    return 0;
}

/* Nothing is called any more but by what ends with it: without entries and objects. */
static int launches_break(Launches* self) {
    Py_XDECREF(launches_clear(self, NULL));
    for (int k = 0; k < OWNED; k++) Py_CLEAR(self->owned[k]);
    for (int k = 0; k < self->nlibraries; k++) Py_CLEAR(self->libraries[k].owner);
    return 0;
}

static void launches_dealloc(Launches* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    launches_break(self);
    for (int k = 0; k < self->nlibraries; k++) Py_CLEAR(self->libraries[k].type);
    type->tp_free((PyObject*)self);
    Py_DECREF(type);
}

/* The objects in the order of their names, where cuLaunchKernel and cuCtxGetDevice lie, and the
 * device as DLPack has it. */
static PyObject* launches_new(PyTypeObject* type, PyObject* given, PyObject* Py_UNUSED(keywords)) {
    PyObject* objects;
    Py_ssize_t launch, get_device;
    int device_type, device;
    if (!PyArg_ParseTuple(given, "O!nn(ii)", &PyTuple_Type, &objects, &launch, &get_device,
                          &device_type, &device))
        return NULL;
    if (PyTuple_GET_SIZE(objects) != OWNED || !PySet_Check(PyTuple_GET_ITEM(objects, GROUPS))) {
        PyErr_SetString(PyExc_TypeError, "not the parts of a rank");
        return NULL;
    }
    Launches* self = (Launches*)type->tp_alloc(type, 0); /* all zero */
    if (self == NULL) return NULL;
    self->vectorcall = launches_call;
    self->launch = (LaunchKernel)launch;
    self->get_device = (GetDevice)get_device;
    self->device_type = device_type, self->device = device;
    for (int k = 0; k < OWNED; k++) self->owned[k] = Py_NewRef(PyTuple_GET_ITEM(objects, k));
    return (PyObject*)self;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launches_launch, METH_FASTCALL, "Enqueue a call."},
    {"add", (PyCFunction)launches_add, METH_VARARGS, "Take a call that was launched before."},
    {"add_like", (PyCFunction)launches_add_like, METH_VARARGS, "Take calls of other counts."},
    {"learn", (PyCFunction)launches_learn, METH_VARARGS, "Read the arrays of a type."},
    {"clear", (PyCFunction)launches_clear, METH_NOARGS, "Forget all calls."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"size", T_PYSSIZET, offsetof(Launches, size), READONLY, NULL},
    {"likes", T_PYSSIZET, offsetof(Launches, nlikes), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launches, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The calls of one rank that were launched before."},
    {Py_tp_new, launches_new},
    {Py_tp_dealloc, launches_dealloc},
    {Py_tp_traverse, launches_traverse},
    {Py_tp_clear, launches_break},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    "ringcoll.executors.cuda._launches.Launches",
    sizeof(Launches),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_launches",
    "Calls of a GPU rank that were launched before.",
    -1,
    NULL,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__launches(void) {
#define INTERN(name)                                   \
    n_##name.text = PyUnicode_InternFromString(#name); \
    if (n_##name.text == NULL) return NULL;
    NAMES(INTERN)
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made == NULL || type == NULL || PyModule_AddObjectRef(made, "Launches", type) < 0 ||
        PyModule_AddIntMacro(made, INTERFACE) < 0 || PyModule_AddIntMacro(made, PLACES) < 0 ||
        PyModule_AddIntConstant(made, "CUPY", CUPY) < 0 ||
        PyModule_AddIntConstant(made, "RAW", RAW) < 0 ||
        PyModule_AddIntConstant(made, "DLPACK", DLPACK) < 0)
        Py_CLEAR(made);
    Py_XDECREF(type);
    return made;
}
