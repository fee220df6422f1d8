"""Take the first group that is complete; stop the stragglers, and let them go on: `quickstart.py [MODEL_DIR]`."""

import sys

import rollout

model = sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m"
config = {"model": {"path": model}, "cluster": {"workers": 2}, "pool": {"budget_bytes": "128MiB"}}
with rollout.start(config) as service:
    service.submit(["What is 3 + 4?", "Name a colour."], n=4)
    done = service.next_groups(1)  # the first group whose four trajectories are over
    late = service.abort(keep="pool", then="hold")  # the others stop, and all their KV moves to the pool
    print(f"{len(late.found)} suspended, {len(late.finished)} had finished")
    service.resume()  # they go on exactly where they stopped, on whichever worker has room
    for group in done + service.next_groups(1):
        for one in group.trajectories:
            print(one.trajectory_id, *one.workers, repr(service.tokenizer.decode(one.output_ids)[:60]))
