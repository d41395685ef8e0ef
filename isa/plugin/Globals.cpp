// What every set must agree on about symbols: each has a name, a section of its own and an address that counts, no
// linker may merge it, and nothing goes through a table of offsets. Attributes that belong to the front end's set go.
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/IR/AttributeMask.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"

using namespace llvm;

namespace godwit {
namespace {

// A section with such a name has __start_ and __stop_ symbols; its variables must stay together, in order.
bool isEnumerable(StringRef Section) {
  return !Section.empty() && all_of(Section, [](char Ch) { return isAlnum(Ch) || Ch == '_'; }) && !isDigit(Section[0]);
}

// Data sections are named after their variables; these names the code generator uses for its own constants.
bool isReserved(StringRef Name) { return Name.starts_with("cst") || Name.starts_with("str"); }

// Sections of functions are named after them; such names would be taken for cold code.
bool isReservedForCode(StringRef Name) { return Name.starts_with("split.") || Name.starts_with("gw."); }

// With an entry count, the code generator moves the blocks that are hardly ever reached (those that capture) to a cold
// section. The number only has to be large against the weights of such branches.
constexpr uint64_t EntryCount = 1000;

void cleanFunction(Function &F) {
  AttributeMask Mask;
  for (StringRef Kind : {"target-cpu", "target-features", "tune-cpu", "frame-pointer", "probe-stack",
                         "stack-probe-size", "min-legal-vector-width", "branch-target-enforcement",
                         "guarded-control-stack", "sign-return-address", "sign-return-address-key"})
    Mask.addAttribute(Kind);
  Mask.addAttribute(Attribute::UWTable);
  // Every function now reads and writes the control block.
  Mask.addAttribute(Attribute::Memory);
  F.removeFnAttrs(Mask);
  for (Instruction &I : instructions(F))
    if (auto *Call = dyn_cast<CallBase>(&I); Call && isRealCall(*Call))
      Call->removeFnAttr(Attribute::Memory);
}

} // namespace

PreservedAnalyses GlobalsPass::run(Module &M, ModuleAnalysisManager &) {
  for (Function &F : M) {
    if (F.isIntrinsic())
      continue;
    F.setUnnamedAddr(GlobalValue::UnnamedAddr::None);
    F.setDSOLocal(true);
    if (F.isDeclaration())
      continue;
    if (F.hasPrivateLinkage())
      F.setLinkage(GlobalValue::InternalLinkage);
    if (isReservedForCode(F.getName()))
      F.setName("gw_" + F.getName());
    if (!F.getSection().starts_with(".text.gw.")) {
      F.setSection("");
      F.setEntryCount(EntryCount);
    }
    cleanFunction(F);
  }
  for (GlobalVariable &G : M.globals()) {
    if (G.getName().starts_with("llvm."))
      continue;
    G.setUnnamedAddr(GlobalValue::UnnamedAddr::None);
    G.setDSOLocal(true);
    if (G.isDeclaration())
      continue;
    if (G.hasPrivateLinkage())
      G.setLinkage(GlobalValue::InternalLinkage);
    if (!G.hasName() || isReserved(G.getName()))
      G.setName("gw." + G.getName());
    if (!isEnumerable(G.getSection()) && !G.getSection().starts_with(".gw."))
      G.setSection("");
  }
  return PreservedAnalyses::none();
}

} // namespace godwit
