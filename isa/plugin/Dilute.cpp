// Makes polls rarer where they would weigh: a small innermost loop is unrolled a few times before it gets its poll,
// with all its exits in each copy, so that one poll stands for several rounds. What the loop computes stays in order.
#include "Passes.h"
#include "Program.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/Analysis/AssumptionCache.h"
#include "llvm/Analysis/LoopInfo.h"
#include "llvm/Analysis/OptimizationRemarkEmitter.h"
#include "llvm/Analysis/ScalarEvolution.h"
#include "llvm/Analysis/TargetTransformInfo.h"
#include "llvm/IR/Dominators.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/Transforms/Utils/LCSSA.h"
#include "llvm/Transforms/Utils/LoopSimplify.h"
#include "llvm/Transforms/Utils/LoopUtils.h"
#include "llvm/Transforms/Utils/UnrollLoop.h"

using namespace llvm;

namespace godwit {
namespace {

// Instructions of a loop that is worth it, and of what it may become.
constexpr unsigned MostInstructions = 16;
constexpr unsigned MostUnrolled = 48;
constexpr unsigned MostCopies = 4;

// How often to unroll; 1 for a loop that stays as it is.
unsigned copies(const Loop &L, ScalarEvolution &SE) {
  if (!L.isInnermost() || !L.getLoopPreheader() || !L.getLoopLatch())
    return 1;
  // It will have no poll at all, or not many rounds.
  unsigned Trips = SE.getSmallConstantMaxTripCount(&L);
  if (Trips != 0 && Trips <= MostSilentTrips)
    return 1;
  unsigned Size = 0;
  for (const BasicBlock *BB : L.blocks())
    for (const Instruction &I : BB->instructionsWithoutDebug()) {
      if (const auto *Call = dyn_cast<CallBase>(&I); Call && !isa<IntrinsicInst>(Call))
        return 1;
      Size += !isa<PHINode>(I);
    }
  if (Size > MostInstructions)
    return 1;
  return std::min(MostCopies, MostUnrolled / std::max(Size, 1U));
}

} // namespace

PreservedAnalyses DilutePass::run(Module &M, ModuleAnalysisManager &MAM) {
  auto &FAM = MAM.getResult<FunctionAnalysisManagerModuleProxy>(M).getManager();
  uint64_t Unrolled = 0;
  for (Function &F : M) {
    if (!isPolled(F) || F.hasOptSize())
      continue;
    auto &LI = FAM.getResult<LoopAnalysis>(F);
    if (LI.empty())
      continue;
    auto &DT = FAM.getResult<DominatorTreeAnalysis>(F);
    auto &SE = FAM.getResult<ScalarEvolutionAnalysis>(F);
    auto &AC = FAM.getResult<AssumptionAnalysis>(F);
    auto &TTI = FAM.getResult<TargetIRAnalysis>(F);
    auto &ORE = FAM.getResult<OptimizationRemarkEmitterAnalysis>(F);
    for (Loop *L : LI.getLoopsInPreorder()) {
      unsigned Count = copies(*L, SE);
      if (Count < 2)
        continue;
      simplifyLoop(L, &DT, &LI, &SE, &AC, nullptr, false);
      formLCSSARecursively(*L, DT, &LI, &SE);
      UnrollLoopOptions Options = {Count, true, false, false, false, true};
      if (UnrollLoop(L, Options, &LI, &SE, &DT, &AC, &TTI, &ORE, true) != LoopUnrollResult::Unmodified)
        ++Unrolled;
    }
    FAM.invalidate(F, PreservedAnalyses::none());
  }
  report("dilute", {{"unrolled-loops", Unrolled}});
  return PreservedAnalyses::none();
}

} // namespace godwit
