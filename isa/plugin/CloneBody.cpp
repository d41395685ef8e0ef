// The part that both kinds of resume clones share; see CloneBody.h.
#include "CloneBody.h"
#include "Program.h"
#include "llvm/IR/DebugInfo.h"
#include "llvm/IR/DebugInfoMetadata.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include <functional>

using namespace llvm;

namespace godwit {

// With -g lines go along, under a description of the clone's own that has the function's name; what the function knew
// of variables goes, since it says nothing of values that come from a frame.
void CloneBody::keepLines() {
  std::vector<std::pair<Instruction *, DILocation *>> Lines;
  for (Instruction &I : instructions(*Clone))
    if (DILocation *Line = I.getDebugLoc())
      Lines.emplace_back(&I, Line);
  stripDebugInfo(*Clone);
  // Lines alone are there without -g too, for refusals.
  const DISubprogram *Of = F.getSubprogram();
  if (!Of || Of->getUnit()->getEmissionKind() != DICompileUnit::FullDebug)
    return;
  DISubprogram *Own = MDNode::replaceWithDistinct(Of->clone());
  Own->replaceRetainedNodes(MDTuple::get(C, {}));
  Clone->setSubprogram(Own);
  DenseMap<const DILocation *, DILocation *> Known;
  std::function<DILocation *(const DILocation &)> InClone = [&](const DILocation &Line) {
    if (DILocation *Same = Known.lookup(&Line))
      return Same;
    const DILocation *At = Line.getInlinedAt();
    DILocation *Outer = At ? InClone(*At) : nullptr;
    // A place where something was inlined is told from others by being itself.
    DILocalScope *Scope = At ? Line.getScope() : Own;
    auto *Made = Line.isDistinct() ? DILocation::getDistinct(C, Line.getLine(), Line.getColumn(), Scope, Outer)
                                   : DILocation::get(C, Line.getLine(), Line.getColumn(), Scope, Outer);
    Known[&Line] = Made;
    return Made;
  };
  for (auto [I, Line] : Lines)
    I->setDebugLoc(InClone(*Line));
}

void CloneBody::cloneBody() {
  Clone = Function::Create(FunctionType::get(F.getReturnType(), false), GlobalValue::InternalLinkage,
                           name::Resume + F.getName(), M);
  // The clone has no arguments; what stands for them is redefined at each site where it is live.
  SmallVector<Instruction *> Arguments;
  for (Argument &A : F.args()) {
    auto *Stand = new FreezeInst(PoisonValue::get(A.getType()), A.getName());
    Arguments.push_back(Stand);
    Map[&A] = Stand;
  }
  SmallVector<ReturnInst *> Returns;
  DISubprogram *Subprogram = F.getSubprogram();
  F.setSubprogram(nullptr);
  CloneFunctionInto(Clone, &F, Map, CloneFunctionChangeType::LocalChangesOnly, Returns);
  F.setSubprogram(Subprogram);
  keepLines();
  Clone->setCallingConv(CallingConv::C);
  Clone->setAttributes(AttributeList());
  Clone->addFnAttr(Attribute::Cold);
  Clone->addFnAttr(Attribute::NoInline);
  Clone->addFnAttr(Attribute::MinSize);
  Clone->addFnAttr(Attribute::OptimizeForSize);
  Clone->setSection(".text.gw.resume");
  BasicBlock &OldEntry = Clone->getEntryBlock();
  for (Instruction *Stand : Arguments)
    Stand->insertInto(&OldEntry, OldEntry.getFirstInsertionPt());

  Entry = BasicBlock::Create(C, "gw.dispatch", Clone, &OldEntry);
  Never = BasicBlock::Create(C, "gw.no.site", Clone);
  IRBuilder<>(Never).CreateUnreachable();
}

void CloneBody::findAlwaysDerived() {
  SmallPtrSet<Value *, 32> Saved;
  for (const Site &S : Sites)
    Saved.insert(S.Saved.values().begin(), S.Saved.values().end());
  for (const Site &S : Sites)
    for (Instruction *I : S.Derived)
      if (!Saved.contains(I))
        AlwaysDerived.insert(I);
  // One site's order says nothing about another's values: sort by who uses whom.
  SmallVector<Instruction *> Sorted;
  SmallPtrSet<Instruction *, 32> Done;
  std::function<void(Instruction *)> Visit = [&](Instruction *I) {
    if (!Done.insert(I).second)
      return;
    for (Value *Operand : I->operands())
      if (auto *Other = dyn_cast<Instruction>(Operand); Other && AlwaysDerived.contains(Other))
        Visit(Other);
    Sorted.push_back(I);
  };
  for (Instruction *I : AlwaysDerived)
    Visit(I);
  AlwaysDerived = SetVector<Instruction *>(Sorted.begin(), Sorted.end());
}

static CallInst *anchorOf(const Function &F) {
  const Function *Drop = F.getParent()->getFunction(name::Anchor);
  if (!Drop)
    return nullptr;
  auto IsHere = [&](const User *U) { return cast<CallInst>(U)->getFunction() == &F; };
  auto Call = find_if(Drop->users(), IsHere);
  return Call == Drop->user_end() ? nullptr : cast<CallInst>(const_cast<User *>(*Call));
}

// What both of its arguments are at a constant distance from: the frame's address (DataStack.cpp).
static Value *frameOf(const CallInst &Anchor) {
  return cast<GetElementPtrInst>(Anchor.getArgOperand(0))->getPointerOperand();
}

bool CloneBody::isAnchored(const Site &S) const {
  const CallInst *Anchor = anchorOf(F);
  return Anchor && (is_contained(S.Saved.values(), frameOf(*Anchor)) || is_contained(S.Derived, frameOf(*Anchor)));
}

void CloneBody::dropAnchor(IRBuilderBase &B, function_ref<Value *(Value *)> Again) {
  CallInst *Anchor = anchorOf(F);
  SmallVector<Value *> Arguments;
  for (Value *Address : Anchor->args()) {
    Instruction *Here = cast<GetElementPtrInst>(Address)->clone();
    Here->setOperand(0, Again(Here->getOperand(0)));
    Arguments.push_back(B.Insert(Here));
  }
  CallInst *Drop = B.CreateCall(Anchor->getCalledFunction(), Arguments);
  Drop->addFnAttr(Attribute::ReturnsTwice);
  BasicBlock *Landing = cast<BranchInst>(Anchor->getParent()->getTerminator())->getSuccessor(0);
  auto *Behind = BasicBlock::Create(C, "gw.anchored", Clone);
  B.CreateCondBr(B.CreateIsNotNull(Drop), cloned(Landing), Behind);
  B.SetInsertPoint(Behind);
}

// Computes a value again in each block that uses it. Its operands are saved wherever it would be live, so they are at
// hand there; and it needs no merging of the ways from all sites, which is most of what such a clone would consist of.
void CloneBody::deriveAtUses(Instruction *Derived) {
  DenseMap<BasicBlock *, Instruction *> Copies;
  for (Use &U : make_early_inc_range(Derived->uses())) {
    auto *User = cast<Instruction>(U.getUser());
    auto *Phi = dyn_cast<PHINode>(User);
    BasicBlock *Where = Phi ? Phi->getIncomingBlock(U) : User->getParent();
    if (Where == Derived->getParent())
      continue;
    Instruction *&Copy = Copies[Where];
    if (!Copy) {
      Copy = Derived->clone();
      Copy->setName(Derived->getName());
      Copy->insertBefore(*Where, Where->getFirstInsertionPt());
    }
    U.set(Copy);
  }
}

} // namespace godwit
