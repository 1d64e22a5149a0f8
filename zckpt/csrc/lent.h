// Bytes that are lent to Python for the length of a call, as a memoryview.
#pragma once
#include <nanobind/nanobind.h>

#include <utility>

#include "mover.h"

namespace zckpt {

// What the view looks into. It counts every reader: the view that is handed over, slices of it, and arrays made of it.
struct Lent {
  char* data;
  Py_ssize_t nbytes;
  Py_ssize_t lookers = 0;
  Bytes kept = nullptr;  // the buffer, where somebody still looked when the call was over
};

inline int look_into(PyObject* self, Py_buffer* view, int flags) {
  auto* lent = nanobind::inst_ptr<Lent>(self);
  if (PyBuffer_FillInfo(view, self, lent->data, lent->nbytes, 1, flags)) return -1;
  ++lent->lookers;
  return 0;
}

inline void look_away(PyObject* self, Py_buffer*) { --nanobind::inst_ptr<Lent>(self)->lookers; }

inline PyType_Slot lent_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(&look_into)}, {Py_bf_releasebuffer, reinterpret_cast<void*>(&look_away)}, {0, nullptr}};

// Calls `taker` with `length` bytes, `from` bytes into `buffer`, and with `at`; the GIL is held. Throws what it raised. Where
// something still looks into them afterwards, the buffer is its own from then on, and `buffer` is empty.
inline void lend(nanobind::handle taker, Bytes& buffer, uint64_t from, uint64_t length, uint64_t at) {
  namespace nb = nanobind;
  const nb::object lender = nb::cast(Lent{buffer.get() + from, static_cast<Py_ssize_t>(length)}, nb::rv_policy::move);
  auto* lent = nb::inst_ptr<Lent>(lender);
  const nb::object view = nb::steal(PyMemoryView_FromObject(lender.ptr()));
  if (!view.is_valid()) throw nb::python_error();
  const auto release = [&] {
    nb::object released = nb::steal(PyObject_CallMethod(view.ptr(), "release", nullptr));
    if (!released.is_valid()) PyErr_Clear();  // something holds the very view
    if (lent->lookers) lent->kept = std::move(buffer);
  };
  try {
    taker(view, at);
  } catch (...) {
    release();
    throw;
  }
  release();
}

}  // namespace zckpt
