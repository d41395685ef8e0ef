// Makes the linked module a closed program: only what the private runtime or the code generator refers to by name
// stays visible, aliases are resolved, and marks in the source become attributes.
//
// The code generator calls functions by itself (`floor`, `fma`, `sqrtl`, …) at places that no pass sees. Such functions
// keep their names, and they and all they call never suspend.
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/RuntimeLibcalls.h"

using namespace llvm;

namespace godwit {
namespace {

// The neutral functions and variables that the private runtime refers to.
constexpr StringLiteral Entries[] = {"__gw_main", "__gw_neutral", "__gw_heap_start"};

// Names that later passes make, or insert calls of; the private runtime has the latter.
constexpr StringLiteral Taken[] = {
    name::Poll,     name::Push,         name::Next,      name::Unpack,          name::Repack,
    name::SetJump,  name::LongJump,     name::Landed,    name::JumpPending,     name::Anchor,
    name::Leave,    name::Sites,        name::SiteCount, name::RunConstructors, name::RunDestructors,
    name::TlsImage, name::TlsImageSize, name::TlsSize};

// A name that no other file can see can as well be another one.
void renameLocals(Module &M) {
  for (GlobalValue &Value : M.global_values())
    if (Value.hasLocalLinkage() && Value.getName().starts_with(name::Prefix))
      Value.setName("local." + Value.getName());
}

void refuseTaken(const Module &M, Refusals &Refused) {
  for (StringRef Name : Taken)
    if (const GlobalValue *Value = M.getNamedValue(Name); Value && !Value->isDeclaration())
      Refused.add(*Value, "the program defines a name of godwit's runtime; names that begin with __gw_ are reserved");
}

StringSet<> libraryCalls() {
  StringSet<> Names;
  for (const char *Set : {"x86_64-linux-musl", "aarch64-linux-musl"}) {
    RTLIB::RuntimeLibcallsInfo Info(Triple{StringRef(Set)});
    for (const char *Name : Info.getLibcallNames())
      if (Name)
        Names.insert(Name);
  }
  // Named there for an optimisation of IR, which is over when the code generator runs. Allocation makes kernel calls,
  // so it must be able to suspend.
  Names.erase("calloc");
  return Names;
}

// `__attribute__((annotate("gw_nosuspend")))` ends as an entry of llvm.global.annotations. Inlined into a function that
// is polled, such a function would be polled as well.
void readAnnotations(Module &M) {
  GlobalVariable *Annotations = M.getGlobalVariable("llvm.global.annotations");
  if (!Annotations)
    return;
  if (auto *Entries = dyn_cast<ConstantArray>(Annotations->getInitializer()))
    for (const Use &Entry : Entries->operands()) {
      auto *Fields = cast<ConstantStruct>(Entry);
      auto *F = dyn_cast<Function>(Fields->getOperand(0)->stripPointerCasts());
      auto *Text = dyn_cast<GlobalVariable>(Fields->getOperand(1)->stripPointerCasts());
      auto *Data = Text && Text->hasInitializer() ? dyn_cast<ConstantDataSequential>(Text->getInitializer()) : nullptr;
      if (F && Data && Data->isCString() && Data->getAsCString() == "gw_nosuspend") {
        F->addFnAttr(NoSuspendAttr);
        F->removeFnAttr(Attribute::AlwaysInline);
        F->addFnAttr(Attribute::NoInline);
      }
    }
  Annotations->eraseFromParent();
}

// Whatever a function that never suspends calls must not suspend either.
void closeNoSuspend(Module &M) {
  SmallSetVector<Function *, 32> Marked;
  for (Function &F : M)
    if (!F.isDeclaration() && F.hasFnAttribute(NoSuspendAttr))
      Marked.insert(&F);
  for (unsigned I = 0; I < Marked.size(); ++I)
    for (Instruction &Inst : instructions(Marked[I]))
      if (auto *Call = dyn_cast<CallBase>(&Inst))
        if (Function *Callee = calleeOf(*Call); Callee && !Callee->isDeclaration())
          Marked.insert(Callee);
  for (Function *F : Marked)
    F->addFnAttr(NoSuspendAttr);
}

// All uses of an alias become uses of its function. Where only the alias has a name that is kept, as in musl's
// `weak_alias(__floor, floor)`, the function takes it; where both have one, the alias stays.
void resolveAliases(Module &M, const StringSet<> &Kept, Refusals &Refused) {
  for (GlobalAlias &Alias : make_early_inc_range(M.aliases())) {
    auto *Target = dyn_cast<Function>(Alias.getAliasee()->stripPointerCasts());
    bool IsKept = Kept.contains(Alias.getName()) && Target && !Target->isDeclaration();
    if (IsKept && Kept.contains(Target->getName()))
      continue;
    std::string Name = Alias.getName().str();
    Alias.replaceAllUsesWith(Alias.getAliasee());
    Alias.eraseFromParent();
    if (IsKept)
      Target->setName(Name);
  }
  for (GlobalIFunc &IFunc : M.ifuncs())
    Refused.add(IFunc, "an indirect function (ifunc) is chosen by a processor's features, which change in a move; "
                       "build this file without multiversioning");
}

} // namespace

PreservedAnalyses PreparePass::run(Module &M, ModuleAnalysisManager &) {
  Refusals Refused("gw-prepare");
  readAnnotations(M);
  renameLocals(M);
  refuseTaken(M, Refused);

  StringSet<> Kept = libraryCalls();
  for (StringRef Entry : Entries)
    Kept.insert(Entry);

  resolveAliases(M, Kept, Refused);

  for (GlobalValue &Value : M.global_values()) {
    if (Value.isDeclaration() || Value.getName().starts_with("llvm."))
      continue;
    if (auto *Object = dyn_cast<GlobalObject>(&Value))
      Object->setComdat(nullptr);
    Value.setDSOLocal(true);
    Value.setVisibility(GlobalValue::DefaultVisibility);
    if (!Kept.contains(Value.getName()) && !Value.getName().starts_with(name::Prefix))
      Value.setLinkage(GlobalValue::InternalLinkage);
    else
      Value.setLinkage(GlobalValue::ExternalLinkage);
    if (auto *F = dyn_cast<Function>(&Value);
        F && Kept.contains(F->getName()) && !F->getName().starts_with(name::Prefix))
      F->addFnAttr(NoSuspendAttr);
  }
  closeNoSuspend(M);
  Refused.exitIfAny();
  return PreservedAnalyses::none();
}

} // namespace godwit
