/* Known sends and receives: a small message goes through the landing zone of its pair, as in
 * executors/point_to_point.py. */

#pragma once

#include "match.h"
#include "run.h"

/* An exchange, the name, arguments, ends and options by which it was found, where the arguments
 * begin, and the number of its first message among all that are made together. */
typedef struct {
    Exchange* exchange;
    PyObject* const* given;
    char* bases[2];
    int first;
} Part;

/* The messages that one call or one group makes: their epochs, and which of them have ended. */
typedef struct {
    int nparts, nmessages, left;
    Part parts[MOST];
    uint64_t epochs[MOST];
    bool done[MOST];
} Sending;

/* Whether one of the messages that are made together is of the pair and direction of another. */
static bool shares_pair(const Sending* sending, const Message* other) {
    for (int at = 0; at < sending->nparts; at++) {
        const Exchange* exchange = sending->parts[at].exchange;
        for (int k = 0; k < exchange->nmessages; k++)
            if (exchange->messages[k].peer == other->peer &&
                exchange->messages[k].sends == other->sends)
                return true;
    }
    return false;
}

/* Whether messages that are made together are none of one pair and direction. */
static bool is_apart(const Sending* sending, const Exchange* exchange) {
    for (int k = 0; k < exchange->nmessages; k++)
        if (shares_pair(sending, &exchange->messages[k])) return false;
    return true;
}

/* Find the exchange of these arguments, which the caller drops, and add it to those that are made
 * together; false: there is none, or no place for it. */
static bool find_exchange(const Calls* self, long context, PyObject* const* given,
                          Sending* sending) {
    PyArray_Descr* kind =
        PyArray_CheckExact(given[1]) ? PyArray_DESCR((PyArrayObject*)given[1]) : NULL;
    Exchange* exchange = self->exchanges[bucket_of(given[0], kind)];
    for (; exchange != NULL; exchange = exchange->next) {
        const Shape* shape = &exchange->shape;
        intptr_t starts[2];
        npy_intp nbytes[2];
        if (shape->name != given[0] || exchange->context != context ||
            !fits(shape, 0, given[1], 1, &starts[0], &nbytes[0]) ||
            !fits(shape, 1, given[2], 1, &starts[1], &nbytes[1]) || !is_same(shape->op, given[3]) ||
            !has_options(shape, given[4]))
            continue;
        bool both = shape->kinds[0] != NULL && shape->kinds[1] != NULL;
        if (both && starts[0] < starts[1] + nbytes[1] && starts[1] < starts[0] + nbytes[0])
            return false;
        if (sending->nmessages + exchange->nmessages > MOST || !is_apart(sending, exchange))
            return false;
        sending->parts[sending->nparts++] =
            (Part){exchange, given, {(char*)starts[0], (char*)starts[1]}, sending->nmessages};
        sending->nmessages += exchange->nmessages;
        exchange->refs++;
        return true;
    }
    return false;
}

/* Count a pair's epoch on, and publish the hello, the entered word last, as Pairs.enter does. */
static int enter_message(const Calls* self, const Message* message, PyObject* epochs,
                         PyObject* number, uint64_t epoch) {
    if (PyObject_SetItem(epochs, message->pair, number) < 0) return -1;
    uint64_t* words = words_of(self, self->rank) + message->own;
    uint64_t* hello = words + self->signatures[epoch % SLOTS];
    hello[0] = message->signature;
    hello[1] = message->record;
    hello[2] = message->count;
    hello[3] = message->label;
    hello[4] = 0;
    store(words + self->entered, epoch << 32);
    return 0;
}

/* Whether the peer's hello has arrived and is of another message, as Pairs.differs. */
static bool differs(const Calls* self, const Message* message, uint64_t epoch) {
    const uint64_t* words = words_of(self, message->peer) + message->other;
    if (load(words + self->entered) < epoch << 32) return false;
    const uint64_t* hello = words + self->signatures[epoch % SLOTS];
    if (load(hello) != message->signature) return true;
    uint64_t label = load(hello + 3);
    return message->label > 0xff && label > 0xff && label != message->label;
}

/* Move a message if its flags have come, as Pairs._try; false: not yet, or it is for Python. */
static bool moved(const Calls* self, const Message* message, uint64_t epoch, char* const* bases) {
    uint64_t base = epoch << 32, credit = message->sends ? base - (1ull << 32) : base;
    const uint64_t* words = words_of(self, message->peer) + message->other;
    const Landing* landing = &message->landings[epoch & 1];
    if (load(words + self->entered) < credit) return false;
    for (int k = 0; k < landing->nwaits; k++)
        if (load(landing->waits[k].word) < base + landing->waits[k].count) return false;
    if (differs(self, message, epoch)) return false;
    char* place = bases[message->base] + message->offset;
    size_t nbytes = (size_t)message->nbytes;
    memcpy(message->sends ? landing->zone : place, message->sends ? place : landing->zone, nbytes);
    for (int k = 0; k < landing->nsignals; k++)
        store(landing->signals[k].word, base + landing->signals[k].count);
    return true;
}

/* Move what can be moved; whether all has been. */
static bool move_all(const Calls* self, Sending* sending) {
    for (int at = 0; at < sending->nparts; at++) {
        const Part* part = &sending->parts[at];
        for (int k = 0; k < part->exchange->nmessages; k++) {
            int number = part->first + k;
            if (!sending->done[number] &&
                moved(self, &part->exchange->messages[k], sending->epochs[number], part->bases)) {
                sending->done[number] = true;
                sending->left--;
            }
        }
    }
    return sending->left == 0;
}

/* Poll for some microseconds, and give the core away some times. */
static bool all_moved(const Calls* self, Sending* sending) {
    for (int k = 0; k <= self->spins; k++) {
        if (move_all(self, sending)) return true;
        pause_polling();
    }
    for (int k = 0; k < self->yields; k++) {
        yield_core();
        if (move_all(self, sending)) return true;
    }
    return false;
}

/* What Python has to know of the messages of a part: the Exchange that it keeps, the arguments, of
 * each message its epoch and whether it has ended, and the name. */
static PyObject* left_of(const Sending* sending, const Part* part) {
    const Exchange* exchange = part->exchange;
    PyObject* halves = PyTuple_New(exchange->nmessages);
    for (int k = 0; halves != NULL && k < exchange->nmessages; k++) {
        PyObject* half = Py_BuildValue("KO", sending->epochs[part->first + k],
                                       sending->done[part->first + k] ? Py_True : Py_False);
        if (half == NULL)
            Py_CLEAR(halves);
        else
            PyTuple_SET_ITEM(halves, k, half);
    }
    if (halves == NULL) return NULL;
    return Py_BuildValue("OOONO", exchange->kept, part->given[1], part->given[2], halves,
                         part->given[0]);
}

/* Let Python go on with messages that have been entered; what it gives, or NULL. */
static PyObject* go_on(const Calls* self, const Sending* sending, PyObject* timeout) {
    PyObject* parts = PyTuple_New(sending->nparts);
    for (int at = 0; parts != NULL && at < sending->nparts; at++) {
        PyObject* left = left_of(sending, &sending->parts[at]);
        if (left == NULL)
            Py_CLEAR(parts);
        else
            PyTuple_SET_ITEM(parts, at, left);
    }
    if (parts == NULL) return NULL;
    const Context* context = &self->contexts[sending->parts[0].exchange->context];
    PyObject* rest = PyObject_CallFunctionObjArgs(context->go_on, parts, timeout, NULL);
    Py_DECREF(parts);
    return rest;
}

/* Publish the hellos of a part in their order, each send behind its own if it can move: 0 or -1. */
static int enter_part(const Calls* self, Sending* sending, const Part* part, PyObject** numbers) {
    const Exchange* exchange = part->exchange;
    PyObject* epochs = self->contexts[exchange->context].epochs;
    for (int k = 0; k < exchange->nmessages; k++) {
        const Message* message = &exchange->messages[k];
        int number = part->first + k;
        uint64_t epoch = sending->epochs[number];
        if (enter_message(self, message, epochs, numbers[number], epoch) < 0) return -1;
        sending->done[number] = moved(self, message, epoch, part->bases);
        sending->left -= sending->done[number];
    }
    for (int k = 0; k < exchange->ncopies; k++) {
        const Copy* copy = &exchange->copies[k];
        memcpy(part->bases[copy->to] + copy->destination, part->bases[copy->from] + copy->source,
               (size_t)copy->nbytes);
    }
    return 0;
}

/* Whether the receiver of a message has made another one: it has had the hello before. */
static bool sends_differ(const Calls* self, const Sending* sending) {
    for (int at = 0; at < sending->nparts; at++) {
        const Part* part = &sending->parts[at];
        for (int k = 0; k < part->exchange->nmessages; k++)
            if (part->exchange->messages[k].sends &&
                differs(self, &part->exchange->messages[k], sending->epochs[part->first + k]))
                return true;
    }
    return false;
}

/* Make all messages; whether they have ended, or -1. */
static int run_messages(const Calls* self, Sending* sending, PyObject** numbers) {
    sending->left = sending->nmessages;
    for (int at = 0; at < sending->nparts; at++)
        if (enter_part(self, sending, &sending->parts[at], numbers) < 0) return -1;
    bool later = sending->parts[0].exchange->later;
    if (sending->left && (later || !all_moved(self, sending))) return 0;
    return !sends_differ(self, sending);
}

/* The next epoch of each message: 1, 0 where one is for Python, or -1; and as Python's numbers. */
static int count_on(const Calls* self, const Part* part, Sending* sending, PyObject** numbers) {
    const Exchange* exchange = part->exchange;
    PyObject* epochs = self->contexts[exchange->context].epochs;
    Py_ssize_t slots = PyList_GET_SIZE(self->owned[NUMBERS]);
    for (int k = 0; k < exchange->nmessages; k++) {
        const Message* message = &exchange->messages[k];
        int number = part->first + k;
        PyObject* kept =
            PyList_GET_ITEM(self->owned[NUMBERS], (Py_ssize_t)(message->record % (uint64_t)slots));
        PyObject* last = PyDict_GetItemWithError(epochs, message->pair);
        if (last == NULL) return PyErr_Occurred() ? -1 : 0;
        if (PyLong_AsUnsignedLongLong(kept) != message->record) return PyErr_Occurred() ? -1 : 0;
        sending->epochs[number] = PyLong_AsUnsignedLongLong(last) + 1;
        if (PyErr_Occurred()) return -1;
        numbers[number] = PyLong_FromUnsignedLongLong(sending->epochs[number]);
        if (numbers[number] == NULL) return -1;
    }
    return 1;
}
