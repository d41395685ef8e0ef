// The cold clone of a suspendable function. It is entered for the frame that __gw_next has just taken off the
// continuation buffer: it jumps to the frame's site, reloads and derives the values that are live there, lets the next
// frame's clone run in place of the call, and goes on behind it. All later calls are to the hot functions.
//
//     entry:  switch site                    site i:  reload, derive
//                                                     %next = call @__gw_next()
//                                                     %r = call %next()
//                                                     br state != 0, cold i, behind i
//
// At the innermost frame, which always is a poll's, __gw_next yields a function that does nothing.
#include "CloneBody.h"
#include "Program.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/IR/Instructions.h"
#include "llvm/Transforms/Utils/Local.h"

using namespace llvm;

namespace godwit {
namespace {

class Cloner : CloneBody {
public:
  Cloner(Function &F, ArrayRef<Site> Sites) : CloneBody(F, Sites) {}
  Function *run();

private:
  void addSite(const Site &S);

  SwitchInst *Dispatch = nullptr;
  Value *Base = nullptr;
  // The values of the clone that sites define again, with the blocks where they do.
  MapVector<Value *, SmallVector<std::pair<BasicBlock *, Value *>>> Definitions;
};

void Cloner::addSite(const Site &S) {
  auto *Enter = BasicBlock::Create(C, "gw.enter", Clone);
  Dispatch->addCase(ConstantInt::get(Type::getInt32Ty(C), S.Id), Enter);
  IRBuilder<> B(Enter);
  MapVector<Value *, Value *> Here;
  for (auto [V, Loaded] : zip(S.Saved.values(), S.Saved.load(B, Base)))
    Here[V] = Loaded;
  for (Instruction *I : S.Derived) {
    Instruction *Again = I->clone();
    Again->setDebugLoc(DebugLoc());
    for (Use &U : Again->operands())
      if (auto It = Here.find(U.get()); It != Here.end())
        U.set(It->second);
    B.Insert(Again, I->getName());
    Here[I] = Again;
  }
  if (isAnchored(S))
    dropAnchor(B, [&](Value *V) { return Here.lookup(V); });
  Value *Next = B.CreateCall(M.getOrInsertFunction(name::Next, B.getPtrTy()));
  CallInst *Result = B.CreateCall(FunctionType::get(S.Call->getType(), false), Next);
  Result->setDebugLoc(cast<Instruction>(Map.lookup(S.Call))->getDebugLoc());
  if (!S.Call->getType()->isVoidTy())
    Here[S.Call] = Result;
  branchOnState(B, cloned(S.Cold), cloned(S.Behind));
  for (auto [V, Again] : Here)
    if (auto *I = dyn_cast<Instruction>(V); !I || !AlwaysDerived.contains(I))
      Definitions[Map.lookup(V)].push_back({Enter, Again});
}

Function *Cloner::run() {
  cloneBody();
  IRBuilder<> B(Entry);
  Base = B.CreateLoad(B.getPtrTy(), threadField(B, OffFrame), "gw.frame");
  Value *Id = B.CreateLoad(B.getInt32Ty(), threadField(B, OffSite), "gw.site");
  Dispatch = B.CreateSwitch(Id, Never, Sites.size());
  findAlwaysDerived();
  for (const Site &S : Sites)
    addSite(S);
  // Users before operands, so that the copies of users are users of the operands' copies.
  for (Instruction *I : reverse(AlwaysDerived))
    deriveAtUses(cast<Instruction>(Map.lookup(I)));
  for (auto &[V, More] : Definitions)
    addDefinitions(V, cast<Instruction>(V)->getParent(), More);
  removeUnreachableBlocks(*Clone);
  return Clone;
}

} // namespace

Function *makeResumeClone(Function &F, ArrayRef<Site> Sites) { return Cloner(F, Sites).run(); }

} // namespace godwit
