// What all passes share: the names and offsets of the neutral ABI (isa/ABI.md), how a call is classified, and how
// a program is refused.
#pragma once

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/InstrTypes.h"
#include "llvm/IR/Module.h"
#include <string>
#include <vector>

namespace godwit {

// Offsets in the control block that the thread pointer points at. isa/runtime/include/gw/thread.h asserts the same.
enum ControlBlock : uint16_t {
  OffRequest = 8,
  OffState = 12,
  OffDataStack = 16,
  OffFrame = 32,
  OffSite = 40,
  OffJumpFrame = 48,
  OffAnchors = 112,
  OffTls = 2048,
};

// Bytes of an anchor (struct gw_anchor of isa/runtime/private/private.h). Its first word is the anchor before it.
inline constexpr unsigned AnchorSize = 256;

// Functions of the private runtime that the passes insert calls to.
namespace name {
inline constexpr llvm::StringLiteral Prefix = "__gw_";
inline constexpr llvm::StringLiteral Poll = "__gw_poll_slow";
inline constexpr llvm::StringLiteral Push = "__gw_push";
inline constexpr llvm::StringLiteral Next = "__gw_next";
// The frame that __gw_next took off last to a clone's slots; and slots to a new frame.
inline constexpr llvm::StringLiteral Unpack = "__gw_unpack";
inline constexpr llvm::StringLiteral Repack = "__gw_repack";
inline constexpr llvm::StringLiteral SetJump = "__gw_setjmp";
inline constexpr llvm::StringLiteral LongJump = "__gw_longjmp";
inline constexpr llvm::StringLiteral Landed = "__gw_landed";
// An anchor: where a function that calls sigsetjmp can be reached natively, once it has been left by a fault.
inline constexpr llvm::StringLiteral Anchor = "__gw_anchor";
// Never defined: stands for "is a longjmp to this frame on its way?" between the setjmp and the capture pass; and
// for "is an exception on its way?".
inline constexpr llvm::StringLiteral JumpPending = "__gw_jump_pending";
// Made by the exceptions pass for the C++ library (libcxx/exceptions.cpp), which defines the other two.
inline constexpr llvm::StringLiteral Leave = "__gw_leave";
inline constexpr llvm::StringLiteral ExceptionSelect = "__gw_exception_select";
inline constexpr llvm::StringLiteral ExceptionEscapes = "__gw_exception_escapes";
inline constexpr llvm::StringLiteral Sites = "__gw_sites";
inline constexpr llvm::StringLiteral SiteCount = "__gw_site_count";
// What the clone of a function is called after, for resuming it.
inline constexpr llvm::StringLiteral Resume = "__gw_resume_";
// Made by the passes, for the C library.
inline constexpr llvm::StringLiteral RunConstructors = "__gw_run_constructors";
inline constexpr llvm::StringLiteral RunDestructors = "__gw_run_destructors";
inline constexpr llvm::StringLiteral TlsImage = "__gw_tls_image";
inline constexpr llvm::StringLiteral TlsImageSize = "__gw_tls_image_size";
inline constexpr llvm::StringLiteral TlsSize = "__gw_tls_size";
} // namespace name

// A defined function with this attribute has no polls and calls nothing that may suspend.
inline constexpr llvm::StringLiteral NoSuspendAttr = "gw-nosuspend";
// On the branch that tests the request: the end of a block that surely polls.
inline constexpr llvm::StringLiteral PollMetadata = "gw.poll";
// A loop without calls of at most this many trips has no poll.
inline constexpr unsigned MostSilentTrips = 64;
// On the latch's branch of a short counted loop, which has no poll.
inline constexpr llvm::StringLiteral SilentMetadata = "gw.silent";

// Private functions are declared only: they run to their end in native code.
bool isPrivate(const llvm::Function &F);
// Defined, and may hold polls.
bool isPolled(const llvm::Function &F);
// The function that a call surely goes to, through aliases and mismatched types; null for an indirect call.
llvm::Function *calleeOf(const llvm::CallBase &Call);
// Not an intrinsic, not inline assembly: a transfer of control to some function.
bool isRealCall(const llvm::CallBase &Call);
// Native, yet early return starts at it: the poll and longjmp.
bool startsEarlyReturn(const llvm::Function &F);
// All functions whose address is used other than to call them.
std::vector<llvm::Function *> addressTaken(llvm::Module &M);

// Address of a field of the running thread's control block, computed anew: one addressing mode on x86-64.
llvm::Value *threadField(llvm::IRBuilderBase &B, unsigned Offset);

// Collects what a pass cannot translate, so that the user sees all of it at once.
class Refusals {
public:
  explicit Refusals(llvm::StringRef PassName) : PassName(PassName) {}
  void add(const llvm::Instruction &At, const llvm::Twine &Reason);
  void add(const llvm::Function &In, const llvm::Twine &Reason);
  void add(const llvm::GlobalValue &Of, const llvm::Twine &Reason);
  // Prints everything that was refused and ends the compiler with status 1, if there is anything.
  void exitIfAny() const;

private:
  std::string PassName;
  std::vector<std::string> Lines;
};

// One line per pass, `gw-stat <pass> <key>=<value> …`, for the driver's --report.
void report(llvm::StringRef PassName, llvm::ArrayRef<std::pair<llvm::StringRef, uint64_t>> Figures);

} // namespace godwit
