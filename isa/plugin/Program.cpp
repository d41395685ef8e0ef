// What all passes share; see Program.h.
#include "Program.h"
#include "llvm/IR/DebugInfoMetadata.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/raw_ostream.h"

using namespace llvm;

namespace godwit {

bool isPrivate(const Function &F) { return F.isDeclaration() && !F.isIntrinsic(); }

bool isPolled(const Function &F) { return !F.isDeclaration() && !F.hasFnAttribute(NoSuspendAttr); }

Function *calleeOf(const CallBase &Call) {
  return dyn_cast<Function>(Call.getCalledOperand()->stripPointerCastsAndAliases());
}

bool isRealCall(const CallBase &Call) { return !Call.isInlineAsm() && !isa<IntrinsicInst>(Call); }

bool startsEarlyReturn(const Function &F) { return F.getName() == name::Poll || F.getName() == name::LongJump; }

std::vector<Function *> addressTaken(Module &M) {
  std::vector<Function *> Taken;
  for (Function &F : M) {
    if (F.isIntrinsic())
      continue;
    bool Escapes = any_of(F.uses(), [&](const Use &U) {
      const auto *Call = dyn_cast<CallBase>(U.getUser());
      return !Call || !Call->isCallee(&U);
    });
    if (Escapes)
      Taken.push_back(&F);
  }
  return Taken;
}

Value *threadField(IRBuilderBase &B, unsigned Offset) {
  Value *Thread = B.CreateIntrinsic(Intrinsic::thread_pointer, {}, {});
  return B.CreateConstInBoundsGEP1_64(B.getInt8Ty(), Thread, Offset);
}

static std::string place(const Function &F) {
  if (const DISubprogram *SP = F.getSubprogram())
    return (SP->getFilename() + ":" + Twine(SP->getLine())).str();
  return F.getParent()->getSourceFileName();
}

// The function that the user has written: the clone of one has its name and, without -g, no lines.
static const Function &written(const Function &F) {
  StringRef Name = F.getName();
  const Function *Of = Name.consume_front(name::Resume) ? F.getParent()->getFunction(Name) : nullptr;
  return Of ? *Of : F;
}

void Refusals::add(const Instruction &At, const Twine &Reason) {
  const Function &F = written(*At.getFunction());
  std::string Where = place(F);
  if (const DILocation *Loc = At.getDebugLoc())
    Where = (Loc->getFilename() + ":" + Twine(Loc->getLine())).str();
  Lines.push_back((Where + ": function '" + F.getName() + "': " + Reason).str());
}

void Refusals::add(const Function &In, const Twine &Reason) {
  const Function &F = written(In);
  Lines.push_back((place(F) + ": function '" + F.getName() + "': " + Reason).str());
}

void Refusals::add(const GlobalValue &Of, const Twine &Reason) {
  Lines.push_back((Of.getParent()->getSourceFileName() + ": symbol '" + Of.getName() + "': " + Reason).str());
}

void Refusals::exitIfAny() const {
  if (Lines.empty())
    return;
  for (const std::string &Line : Lines)
    errs() << "error: " << Line << " [" << PassName << "]\n";
  errs().flush();
  sys::Process::Exit(1);
}

void report(StringRef PassName, ArrayRef<std::pair<StringRef, uint64_t>> Figures) {
  errs() << "gw-stat " << PassName;
  for (const auto &[Key, Value] : Figures)
    errs() << ' ' << Key << '=' << Value;
  errs() << '\n';
}

} // namespace godwit
