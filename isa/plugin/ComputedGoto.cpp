// Labels as values: `&&label` becomes a small number, the same on every set, and `goto *p` a switch over the labels
// of the function whose address is taken. Runs before the optimiser, which then may clone and inline such functions.
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/IR/Constants.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/PatternMatch.h"
#include "llvm/Transforms/Utils/Local.h"

using namespace llvm;

namespace godwit {
namespace {

// A label's number. Not small, so that it is told from the indices and errors a program may keep beside labels;
// zero is never one, since labels compare unequal to NULL.
constexpr uint64_t FirstLabel = 0x1000;

using LabelNumbers = MapVector<BasicBlock *, uint64_t>;

// What a branch switches on, and where each value leads. An interpreter's `goto *table[code]` switches on the code
// itself: with the number of a label it would go through two tables, the program's and the switch's.
struct Targets {
  Value *Index = nullptr;
  SmallVector<std::pair<uint64_t, BasicBlock *>> Cases;
};

// The targets of a branch by the index of a table that never changes; no index when it is not of that kind.
Targets targetsByIndex(const IndirectBrInst &Branch) {
  Targets Found;
  const auto *Load = dyn_cast<LoadInst>(Branch.getAddress());
  const auto *Place = Load && Load->isSimple() ? dyn_cast<GetElementPtrInst>(Load->getPointerOperand()) : nullptr;
  const auto *Table = Place ? dyn_cast<GlobalVariable>(Place->getPointerOperand()) : nullptr;
  if (!Table || !Table->isConstant() || !Table->hasDefinitiveInitializer())
    return Found;
  const auto *Entries = dyn_cast<ConstantArray>(Table->getInitializer());
  bool IsElement = Entries && Place->getSourceElementType() == Entries->getType() && Place->getNumIndices() == 2 &&
                   match(Place->getOperand(1), PatternMatch::m_Zero()) &&
                   Place->getOperand(2)->getType()->isIntegerTy(64);
  if (!IsElement)
    return Found;
  for (unsigned I = 0; I < Entries->getNumOperands(); ++I)
    if (const auto *Address = dyn_cast<BlockAddress>(Entries->getOperand(I)))
      if (Address->getFunction() == Branch.getFunction())
        Found.Cases.push_back({I, Address->getBasicBlock()});
  Found.Index = Place->getOperand(2);
  return Found;
}

// The same by the numbers of labels.
Targets targetsByLabel(IndirectBrInst &Branch, const LabelNumbers &Labels) {
  Targets Found;
  for (const auto &[Block, Number] : Labels)
    Found.Cases.push_back({Number, Block});
  IRBuilder<> B(&Branch);
  Found.Index = B.CreatePtrToInt(Branch.getAddress(), B.getInt64Ty(), "gw.label");
  return Found;
}

void lowerBranch(IndirectBrInst *Branch, const Targets &To) {
  Function &F = *Branch->getFunction();
  BasicBlock *From = Branch->getParent();
  auto *Never = BasicBlock::Create(F.getContext(), "gw.no.label", &F);
  IRBuilder<>(Never).CreateUnreachable();

  // A case is an edge, and a block's phis have an entry for each edge.
  SmallVector<BasicBlock *> Old(successors(Branch));
  MapVector<BasicBlock *, unsigned> Edges;
  for (BasicBlock *BB : Old)
    ++Edges[BB];
  // Its default cannot be reached, so a dense jump table needs no range check.
  IRBuilder<> B(Branch);
  SwitchInst *Switch = B.CreateSwitch(To.Index, Never, To.Cases.size());
  for (auto [Number, BB] : To.Cases) {
    auto Known = Edges.find(BB);
    // What the front end does not name as a destination this branch never goes to.
    if (Known == Edges.end())
      continue;
    Switch->addCase(B.getInt64(Number), BB);
    for (PHINode &Phi : BB->phis())
      Phi.addIncoming(Phi.getIncomingValueForBlock(From), From);
  }
  for (auto [BB, Count] : Edges)
    for (; Count > 0; --Count)
      BB->removePredecessor(From, is_contained(successors(Switch), BB));
  Value *Address = Branch->getAddress();
  Branch->eraseFromParent();
  RecursivelyDeleteTriviallyDeadInstructions(Address);
}

} // namespace

PreservedAnalyses ComputedGotoPass::run(Module &M, ModuleAnalysisManager &) {
  uint64_t Branches = 0;
  uint64_t ByIndex = 0;
  for (Function &F : M) {
    SmallVector<std::pair<IndirectBrInst *, Targets>> Found;
    for (BasicBlock &BB : F)
      if (auto *Branch = dyn_cast<IndirectBrInst>(BB.getTerminator()))
        Found.push_back({Branch, targetsByIndex(*Branch)});
    LabelNumbers Labels;
    for (BasicBlock &BB : F) {
      if (!BB.hasAddressTaken())
        continue;
      uint64_t Number = FirstLabel + Labels.size();
      Labels[&BB] = Number;
      BlockAddress *Address = BlockAddress::lookup(&BB);
      auto *Type = cast<PointerType>(Address->getType());
      Address->replaceAllUsesWith(
          ConstantExpr::getIntToPtr(ConstantInt::get(Type::getInt64Ty(M.getContext()), Number), Type));
      Address->destroyConstant();
    }
    for (auto &[Branch, To] : Found) {
      ByIndex += To.Index != nullptr;
      lowerBranch(Branch, To.Index ? To : targetsByLabel(*Branch, Labels));
    }
    Branches += Found.size();
  }
  report("computed-goto", {{"branches", Branches}, {"by-index", ByIndex}});
  return PreservedAnalyses::none();
}

} // namespace godwit
