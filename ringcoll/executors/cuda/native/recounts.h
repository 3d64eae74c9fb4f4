/* Calls whose count has not come often: what of a kept parameter it decides.
 *
 * As LLRecounts with the layout, the lines and the grid that it asks, which say why. What runs for
 * which counts, and that a count has not come often, Python says. */

#pragma once

#include "../../native/same.h"
#include "arrays.h"
#include "names.h"
#include "types.h"

static void drop_like(Like* like) {
    if (--like->refs > 0) return;
    Py_CLEAR(like->name);
    Py_CLEAR(like->op);
    for (int k = 0; k < 2; k++) Py_CLEAR(like->dtypes[k]);
    Py_CLEAR(like->begin);
    Py_CLEAR(like->launchable);
    PyMem_Free(like->places);
    PyMem_Free(like->counts);
    PyMem_Free(like->users);
    PyMem_Free(like->slots);
    PyMem_Free(like->fixed);
    PyMem_Free(like);
}

static Like** likes_of(Launches* self, PyObject* name) {
    return &self->likes[((uintptr_t)name >> 4) % BUCKETS];
}

/* The count of a call on arguments of so many bytes; 0: it differs in more. */
static long long count_of(const Like* like, const Py_ssize_t* nbytes) {
    int first = like->units[0] == 0;
    long long count = like->units[first] == 0 ? 0 : nbytes[first] / like->units[first];
    if (count < like->first || count >= like->last) return 0; /* first: no product overflows */
    for (int k = 0; k < 2; k++)
        if (nbytes[k] != count * like->units[k] || (nbytes[k] & 7) != like->odd[k]) return 0;
    long long total = count * like->each;
    return total >= like->low && total < like->high ? count : 0;
}

/* The count of a call with these arguments of a kind that is known, or 0. */
static long long matches(const Like* like, PyObject* const* given, long root,
                         const Reading* arguments) {
    Py_ssize_t nbytes[2];
    for (int k = 0; k < 2; k++) {
        const Reading *known = &like->arguments[k], *now = &arguments[k];
        if (known->library != now->library || known->kind != now->kind) return 0;
        nbytes[k] = (Py_ssize_t)(now->size * like->items[k]);
    }
    if (like->name != given[0] || like->root != root || !is_same(like->op, given[3]) ||
        alignment_of(arguments) != like->alignment)
        return 0;
    intptr_t distance;
    bool shared = is_shared(arguments, nbytes, &distance);
    if (shared != like->one || (shared && distance != 0)) return 0;
    return count_of(like, nbytes);
}

/* -- where its elements lie -------------------------------------------------------------------- */

static long long up(long long number, long long unit) { return (number + unit - 1) / unit; }

/* Layout._cut: where a chunk of a segment begins. */
static long long cut(const Like* like, long long count, long long chunk) {
    if (chunk == like->chunks) return count;
    long long end = up(count * chunk, like->chunks * like->align) * like->align;
    return end < count ? end : count;
}

/* Layout.span of a place, of whole chunks. */
static Span span_of(const Like* like, long long count, long long place) {
    long long segment = place / like->chunks, within = place % like->chunks;
    long long low = cut(like, count, within);
    return (Span){segment * count + low, cut(like, count, within + 1) - low};
}

/* LLLayout.packs. */
static long long packs_of(const Like* like, long long width) {
    if (like->lanes == 1) return up(width, like->held);
    long long lines = up(up(width * like->item, 8), 2 * like->lanes - 1);
    return up(lines, 32 / like->lanes) * 32;
}

/* LLGrid.of. */
static void use_grid(Placed* placed) {
    const Like* like = placed->like;
    long long workers = like->widths[like->nwidths - 1];
    for (int k = 0; k < like->nwidths; k++)
        if (up(placed->packs, like->widths[k]) <= like->few) {
            workers = like->widths[k];
            break;
        }
    long long blocks = up(placed->packs, workers);
    placed->blocks = (unsigned)(blocks < like->most ? blocks : like->most);
    placed->threads = (unsigned)(workers + like->sync);
}

/* LLRecounts.placed: whether the kernel runs it. */
static bool place(Placed* placed) {
    const Like* like = placed->like;
    for (int k = 0; k < like->nplaces; k++)
        placed->spans[k] = span_of(like, placed->count, like->places[k]);
    bool whole = true;
    for (int k = 0; whole && k < like->nusers; k++) {
        const User* user = &like->users[k];
        long long length = user->length < 0 ? 0 : placed->spans[user->length].length;
        uint64_t start = like->given[user->number];
        start += (uint64_t)(placed->spans[user->place].first * like->item);
        if (((uint64_t)(length * like->item) | start) & 7) whole = false;
    }
    if (whole != like->whole) return false;
    long long width = up(cut(like, placed->count, 1), like->align) * like->align;
    placed->packs = packs_of(like, width);
    use_grid(placed);
    return true;
}

/* Find calls that differ from one in the count alone, and where its elements lie. */
static bool find_like(Launches* self, PyObject* const* given, const Reading* arguments,
                      Placed* placed) {
    long root;
    if (!read_root(given[4], &root)) return false;
    for (Like* like = *likes_of(self, given[0]); like != NULL; like = like->next) {
        placed->like = like, placed->count = matches(like, given, root, arguments);
        if (placed->count != 0 && place(placed)) return true;
    }
    return false;
}

static uint64_t low_half(uint64_t word, uint64_t low) {
    return (word & ~(uint64_t)0xffffffff) | (low & 0xffffffff);
}

/* LLPlaced.write and sign: all words that the call decides. */
static void write_words(const Placed* placed, const uintptr_t* addresses) {
    const Like* like = placed->like;
    uint64_t* words = like->words;
    uint64_t each = (uint64_t)(placed->packs * like->pack_bytes);
    for (int k = 0; k < like->ncounts; k++)
        words[like->counts[k].word] = (uint64_t)placed->spans[like->counts[k].place].length;
    words[like->packs_at] = (uint64_t)placed->packs;
    for (int k = 0; k < like->nslots; k++)
        words[like->slots[k].word] = like->slots[k].start + like->slots[k].index * each;
    for (int k = 0; k < like->nusers; k++) {
        const User* user = &like->users[k];
        words[user->word] =
            addresses[user->number] + (uint64_t)(placed->spans[user->place].first * like->item);
    }
    for (int k = 0; k < like->nfixed; k++)
        words[like->fixed[k].word] = addresses[like->fixed[k].number] + like->fixed[k].offset;
    words[like->signature_at] = low_half(words[like->signature_at], placed->signature);
    words[like->number_at] = low_half(words[like->number_at], placed->number);
    words[like->timeout_at] = like->timeout;
}

/* Let Python note a call, behind what it is told of: 1, 0 if its count has come often, or -1. */
static int begin(Placed* placed, PyObject** prepared) {
    *prepared = PyObject_CallFunction(placed->like->begin, "LII", placed->count, placed->blocks,
                                      placed->threads);
    if (*prepared == NULL) return -1;
    if (*prepared == Py_None) return 0;
    long long signature, number;
    if (number_of(*prepared, &n_signature, &signature) < 0 ||
        number_of(*prepared, &n_number, &number) < 0)
        return -1;
    placed->signature = (uint64_t)signature, placed->number = (uint64_t)number;
    return 1;
}

/* -- what Python gives ------------------------------------------------------------------------- */

/* Room for the items of a tuple, and how many there are; NULL where an exception is raised. */
static void* room_for(PyObject* items, size_t size, int most, int* found) {
    *found = (int)PyTuple_GET_SIZE(items);
    if (PyTuple_GET_SIZE(items) > most) {
        PyErr_SetString(PyExc_ValueError, "too many");
        return NULL;
    }
    void* room = PyMem_Calloc((size_t)*found + 1, size);
    return room != NULL ? room : PyErr_NoMemory();
}

/* Whether a word of the parameter, an address of a launch and a place are there; -1 is no place. */
static bool is_there(const Like* like, Py_ssize_t word, int number, int place, int length) {
    bool there = word >= 0 && word < like->nwords && number >= 0 && number < GIVEN;
    if (there && place >= 0 && place < like->nplaces && length >= -1 && length < like->nplaces)
        return true;
    PyErr_SetString(PyExc_IndexError, "no such word, address or place");
    return false;
}

static int read_widths(Like* like, PyObject* widths) {
    like->nwidths = (int)PyTuple_GET_SIZE(widths);
    if (like->nwidths < 1 || like->nwidths > WIDTHS)
        PyErr_SetString(PyExc_ValueError, "no such widths");
    for (int k = 0; !PyErr_Occurred() && k < like->nwidths; k++) {
        like->widths[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(widths, k));
        if (!PyErr_Occurred() && like->widths[k] < 1)
            PyErr_SetString(PyExc_ValueError, "no such width");
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Read the words that a count decides, each kind by its tuple. */
static int read_words(Like* like, PyObject* const* kinds) {
    like->places = room_for(kinds[0], sizeof *like->places, PLACES, &like->nplaces);
    if (like->places == NULL) return -1;
    like->counts = room_for(kinds[1], sizeof *like->counts, INT_MAX, &like->ncounts);
    if (like->counts == NULL) return -1;
    like->users = room_for(kinds[2], sizeof *like->users, INT_MAX, &like->nusers);
    if (like->users == NULL) return -1;
    like->slots = room_for(kinds[3], sizeof *like->slots, INT_MAX, &like->nslots);
    if (like->slots == NULL) return -1;
    like->fixed = room_for(kinds[4], sizeof *like->fixed, INT_MAX, &like->nfixed);
    if (like->fixed == NULL) return -1;
    for (int k = 0; k < like->nplaces; k++) {
        like->places[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(kinds[0], k));
        if (PyErr_Occurred()) return -1;
    }
    for (int k = 0; k < like->ncounts; k++) {
        CountWord* of = &like->counts[k];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds[1], k), "ni", &of->word, &of->place) ||
            !is_there(like, of->word, 0, of->place, -1))
            return -1;
    }
    for (int k = 0; k < like->nusers; k++) {
        User* of = &like->users[k];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds[2], k), "niii", &of->word, &of->number,
                              &of->place, &of->length) ||
            !is_there(like, of->word, of->number, of->place, of->length))
            return -1;
        if (of->number > 1) {
            PyErr_SetString(PyExc_IndexError, "neither INPUT nor OUTPUT");
            return -1;
        }
    }
    for (int k = 0; k < like->nslots; k++) {
        Slot* of = &like->slots[k];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds[3], k), "nKK", &of->word, &of->start,
                              &of->index) ||
            !is_there(like, of->word, 0, 0, -1))
            return -1;
    }
    for (int k = 0; k < like->nfixed; k++) {
        Fill* of = &like->fixed[k];
        long long offset;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds[4], k), "niL", &of->word, &of->number,
                              &offset) ||
            !is_there(like, of->word, of->number, 0, -1))
            return -1;
        of->offset = (uint64_t)offset;
    }
    return 0;
}

/* Read LLRecounts.table. */
static int read_table(Like* like, PyObject* table) {
    PyObject *widths, *kinds[5];
    int whole;
    if (!PyArg_ParseTuple(table, "(LL)(LLLLp)(LLLO!)O!O!O!O!O!(KK)", &like->chunks, &like->align,
                          &like->item, &like->held, &like->lanes, &like->pack_bytes, &whole,
                          &like->most, &like->few, &like->sync, &PyTuple_Type, &widths,
                          &PyTuple_Type, &kinds[0], &PyTuple_Type, &kinds[1], &PyTuple_Type,
                          &kinds[2], &PyTuple_Type, &kinds[3], &PyTuple_Type, &kinds[4],
                          &like->given[0], &like->given[1]))
        return -1;
    like->whole = whole != 0;
    bool some = like->chunks > 0 && like->align > 0 && like->item > 0;
    if (!some || like->held < 1 || like->lanes < 1 || like->lanes > 32) {
        PyErr_SetString(PyExc_ValueError, "no such layout");
        return -1;
    }
    return read_widths(like, widths) < 0 ? -1 : read_words(like, kinds);
}

/* Read where the words are. */
static int read_parameter(Like* like) {
    long long address = 0;
    PyObject* parameter = get(like->launchable, &n_parameter);
    PyObject* words = parameter == NULL ? NULL : get(parameter, &n_words);
    like->nwords = words == NULL ? -1 : PyObject_Size(words);
    if (like->nwords >= 0 && number_of(parameter, &n_address, &address) < 0) like->nwords = -1;
    Py_XDECREF(words);
    Py_XDECREF(parameter);
    like->words = (uint64_t*)(uintptr_t)address;
    const Py_ssize_t at[] = {like->packs_at, like->signature_at, like->number_at, like->timeout_at};
    for (int k = 0; like->nwords >= 0 && k < 4; k++)
        if (at[k] < 0 || at[k] >= like->nwords) {
            PyErr_SetString(PyExc_IndexError, "no such word");
            return -1;
        }
    return like->nwords < 0 ? -1 : 0;
}

/* Whether calls on one parameter, which are alike but for this, are found by the same arguments. */
static bool is_one_kind(const Like* one, const Like* other) {
    for (int k = 0; k < 2; k++)
        if (one->arguments[k].library != other->arguments[k].library ||
            one->arguments[k].kind != other->arguments[k].kind)
            return false;
    return is_same(one->op, other->op);
}

/* Read of both arguments what does not depend on the count. */
static int read_shape(Like* like, PyObject* const* given, const Reading* arguments,
                      const Py_ssize_t* nbytes, long long count) {
    like->name = Py_NewRef(given[0]), like->op = Py_NewRef(given[3]);
    like->alignment = alignment_of(arguments);
    intptr_t distance;
    like->one = is_shared(arguments, nbytes, &distance);
    for (int k = 0; k < 2; k++) {
        like->arguments[k] = arguments[k];
        if (arguments[k].library == NULL) continue;
        if (arguments[k].library->reader != DLPACK) {
            like->dtypes[k] = get(given[1 + k], &n_dtype);
            if (like->dtypes[k] == NULL) return -1;
            like->arguments[k].kind = (uintptr_t)like->dtypes[k];
        }
        like->items[k] = nbytes[k] / arguments[k].size, like->units[k] = nbytes[k] / count;
        like->odd[k] = nbytes[k] & 7;
        if (like->units[k] < 1 || nbytes[k] % count || nbytes[k] % arguments[k].size) {
            PyErr_SetString(PyExc_ValueError, "no whole elements");
            return -1;
        }
    }
    return 0;
}
