"""A conversation with a calculator, turn by turn, without computing a token twice: `tool_loop.py [MODEL_DIR]`.

Each answer ends a turn. The loop evaluates the last sum in it and appends the result as a message. Those tokens were
not sampled, so they carry no loss. The conversation's KV is kept in between.
"""

import ast
import operator
import re
import sys
from collections import Counter

import rollout

QUESTIONS = ["What is 3 + 4? Show the sum.", "A box holds 12 eggs. How many eggs are in 11 boxes?"]
TURNS = 3
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SUM = re.compile(r"[\d(][\d .()]*[-+*/][-+*/\d .()]{,80}")


def calculate(text: str) -> str:
    """What the last sum in a text comes to, or that there is none."""
    for written in reversed(SUM.findall(text)):
        try:
            return f"{value(ast.parse(written.strip(), mode='eval').body):g}"
        except (SyntaxError, ValueError, ArithmeticError):
            continue
    return "no sum found"


def value(node: ast.expr) -> float:
    """Of numbers and the four operations; nothing else is run."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return float(OPERATORS[type(node.op)](value(node.left), value(node.right)))
    raise ValueError("not a sum")


def main(model: str) -> None:
    config = {
        "model": {"path": model},
        "cluster": {"workers": 2},
        "pool": {"budget_bytes": "128MiB"},
        "abort": {"keep": "pool"},  # always keep the KV; `auto` computes it again where that is cheaper
    }
    with rollout.start(config) as service:
        sampling = rollout.SamplingParams(temperature=0.7, max_new_tokens=400)  # of all turns together
        groups = service.submit(QUESTIONS, n=2, sampling=sampling, chat=True, multi_turn=True, caller="calculator")
        turns: Counter[str] = Counter()
        read: Counter[str] = Counter()  # sampled tokens of each conversation that the loop has seen
        while waiting := service.next_turns(4):
            for one in waiting:
                name = one.trajectory_id
                said = [token for token, sampled in zip(one.output_ids, one.loss_mask, strict=True) if sampled]
                answer = service.tokenizer.decode(said[read[name] :])
                read[name] = len(said)
                turns[name] += 1
                if turns[name] == TURNS:
                    service.abort(name, then="finish")
                    continue
                found = calculate(answer)
                print(f"{name} said {answer.strip()[-40:]!r}, the calculator {found!r}")
                service.extend(one, [{"role": "user", "content": f"Calculator: {found}. Go on."}])
        for group in service.next_groups(len(groups)):
            for one in group.trajectories:
                mask = " ".join(f"{'-' if run.version is None else '+'}{run.tokens}" for run in one.versions)
                recomputed = sum(resume.recomputed_tokens for resume in one.resumes)
                print(f"{one.trajectory_id} {one.finish_reason}: mask {mask}, {recomputed} tokens recomputed")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m")
