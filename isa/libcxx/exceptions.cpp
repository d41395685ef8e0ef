// Exceptions of neutral programs: in the place of libunwind, and of the part of
// libc++abi that reads a native program's tables. The plugin
// (isa/plugin/Exceptions.cpp) makes an exception an early return to the next
// function that has a landing pad; there __gw_exception_select says whether one
// of its handlers takes it.
//
// What is on its way is plain data of the program, so a thread can be captured
// in a clean-up like anywhere else.
#include "cxa_exception.h"
#include "cxa_handlers.h"
#include "private_typeinfo.h"
#include <exception>

using namespace __cxxabiv1;

// Made by the plugin: the caller, its caller and so on return, until one has a
// landing pad.
extern "C" void __gw_leave(_Unwind_Exception *exception);

// A handler of a landing pad, as the plugin lists them: its type, null for all;
// and its number, which is positive. Types with the number 0 are those that an
// exception specification allows, up to one with a negative number; a null with
// 0 ends the list.
struct Clause {
  const __shim_type_info *type;
  long number;
};

namespace {

// Of the exception itself, not of what std::rethrow_exception has made of it.
void *thrown_object(_Unwind_Exception *exception) {
  if (__getExceptionClass(exception) == kOurDependentExceptionClass)
    return (reinterpret_cast<__cxa_dependent_exception *>(exception + 1) - 1)->primaryException;
  return exception + 1;
}

__cxa_exception *header_of(_Unwind_Exception *exception) {
  return reinterpret_cast<__cxa_exception *>(exception + 1) - 1;
}

// Where the handler finds the object, if it takes it.
bool takes(const __shim_type_info *type, _Unwind_Exception *exception, void *&object) {
  object = thrown_object(exception);
  auto *thrown = static_cast<const __shim_type_info *>(header_of(exception)->exceptionType);
  return !type || type->can_catch(thrown, object);
}

} // namespace

extern "C" {

// Native programs have it from a start file. It tells shared objects apart, of
// which there are none.
void *__dso_handle = nullptr;

// Returns to nobody: a program that calls it has a landing pad somewhere, or
// ends by __gw_exception_escapes.
_Unwind_Reason_Code _Unwind_RaiseException(_Unwind_Exception *exception) {
  __gw_leave(exception);
  __builtin_unreachable();
}

void _Unwind_DeleteException(_Unwind_Exception *exception) {
  if (exception->exception_cleanup)
    exception->exception_cleanup(_URC_FOREIGN_EXCEPTION_CAUGHT, exception);
}

// The number of the first handler that takes it, a negative one where a
// specification does not allow it, 0 for neither.
int __gw_exception_select(_Unwind_Exception *exception, const Clause *clause) noexcept {
  void *object = nullptr;
  bool allowed = false;
  for (; clause->type || clause->number != 0; ++clause) {
    if (clause->number == 0) {
      allowed = allowed || takes(clause->type, exception, object);
    } else if (clause->number > 0 ? takes(clause->type, exception, object) : !allowed) {
      header_of(exception)->adjustedPtr = clause->number > 0 ? object : thrown_object(exception);
      return static_cast<int>(clause->number);
    } else {
      allowed = false;
    }
  }
  return 0;
}

// An exception would leave a function of C, the thread's first one for example,
// which has no way to let it through.
void __gw_exception_escapes(_Unwind_Exception *exception) noexcept {
  __cxa_begin_catch(exception);
  std::terminate();
}

// A dynamic exception specification does not allow it. What the handler throws
// is not compared with the specification.
void __cxa_call_unexpected(void *exception) {
  __cxa_begin_catch(exception);
  std::__unexpected(header_of(static_cast<_Unwind_Exception *>(exception))->unexpectedHandler);
}

// The front end names it in every function with a landing pad. Nobody calls it.
_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, uint64_t, _Unwind_Exception *, _Unwind_Context *) {
  return _URC_FATAL_PHASE1_ERROR;
}

// The same of C sources that are compiled with -fexceptions.
_Unwind_Reason_Code __gcc_personality_v0(int, _Unwind_Action, uint64_t, _Unwind_Exception *, _Unwind_Context *) {
  return _URC_FATAL_PHASE1_ERROR;
}

} // extern "C"
