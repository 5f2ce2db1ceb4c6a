# Everything that a fresh machine with Python needs:
#
#   make demo    set up, then train a small language model on two ranks
#   make test    set up, then run the tests
#   make test-quick   a minute of them, in one process: for the loop of an edit
#   make lint    formatter, linter and strict type checker
#   make docs    the documentation site, into site/; warnings are errors
#   make bench   all_reduce beside Gloo
#
# The tests have a long form, too, with four times as many examples of hypothesis, a thousand ranks
# where the short form proves a schedule with hundreds, and every size and combination where the
# short form takes some of each kind (tests/forms.py). It is for a machine with time:
#
#   PHALANX_TESTS_LONG=1 make test
#
# The backend of torch.distributed depends on torch's version. In an environment of its own:
#
#   make test-torch-next                         its tests on the newest torch
#   make test-torch-next TORCH=torch==2.9.1      on another one
#
# The clusters and trainers that Phalanx works with (docs/clusters.md) are tested with the real ones:
# Ray, Slurm, Kubernetes, Accelerate, Hugging Face's Trainer, Lightning, Jupyter. In an environment of
# its own, and with Debian's packages of Slurm and Chromium (for the pages of `phalanx watch --web` and
# `phalanx trace --html`), which root installs where there is apt-get; what is missing is skipped, with
# the reason. It takes ten to fifteen minutes on two cores:
#
#   make test-clients                            or some: ARGS="-k lightning"
#
# The recipes of docs/recipes.md by their commands, in the same environment: with peft, transformers and a C++
# compiler; between two network namespaces, where that is allowed (root). The rest is skipped, with the reason:
#
#   make recipes                                 or some: ARGS="-k lora"
#
# Long forms of what the tests do in short, each of which prints N of N:
#
#   make stress    random programs on every backend, compared with a plain reference
#   make exact     random steps, splits, batches and samplers on 1 to 8 ranks, compared with one process
#   make blame     ranks killed, stopped, cut off: who is named, and how soon
#   make torch-blame  the same under torch.distributed: in all_reduce, and while DDP and FSDP2 are in
#                  their backward passes; and in the step after
#   make bad-days  the launcher killed, interrupted and restarted
#   make fuzz      bytes that nobody should send
#   make flood     how long a job takes to form with a crowd of strangers at its door
#   make wide      64, 256 and 1,024 ranks: how soon they form, and hear that one of them died
#   make two-hosts algorithms side by side between two hosts, and torch's wrappers; needs root
#   make links     how much of a link of 1 and 10 Gbit/s ranks use, beside Gloo; needs root
#   make attack    strangers at every door of a job, hostile files, forks, signals: all that is refused
#   make elastic   elastic jobs whose ranks are killed, stopped, told to leave, replaced: how soon the
#                  others go on; 45 minutes, or ARGS="--only kill --count 0.1"
#   make elastic-costs  what it costs their steps when nothing fails
#   make soak      an elastic job with mixed faults: steps, memory, descriptors; half an hour
#   make kill-saves checkpoints whose save is killed, or whose disk is full
#   make notices   ranks told to leave at random moments: one checkpoint, exit code 75, and the run that
#                  goes on comes to the weights of one that was never interrupted
#   make combinations  every wrapper with every feature, and with every two of them, on three backends;
#                  ARGS=--faults shows that planted faults are found
#   make fence     the library's own tests, with a package that has neither ops/ nor cli/
#   make mutants   wrong lines, put into the core and FSDP one at a time: do the tests notice?
#   make agreement what it costs that ranks compare what they do
#   make torch     a stock program for torch.distributed under every launcher, and PowerSGD's hook
#   make device    tensors on a GPU beside those of the CPU, and NCCL beside torch.distributed; says
#                  what was skipped where there is none
#
# Compression, measured on the language model (docs/compression.md):
#
#   make loss-against-bytes  the loss that each way to send less comes to, and what it sends
#   make slow-link           steps over a link of 100 Mbit/s; needs root
#   make pipeline-bubble     how long the ranks of a pipeline wait, in every schedule
#   make thresholds          the sizes at which collectives in shared memory change their way
#   make numbers             docs/numbers.md and the rows of README, measured again
#
# Beside torch, Accelerate, DeepSpeed and torchft (docs/beside-others.md), in an environment of its own;
# what cannot be installed is left out. Six minutes on two idle cores, and some for the installation:
#
#   make beside              all_reduce and training steps; ARGS=--write rewrites the page's numbers
#
# Before a change lands, and to see what it changes:
#
#   make gate      the working tree's times beside those of the commit BASE; fails where one is
#                  more than 5 % slower. Half an hour on an idle machine (ARGS="--only shm" is less)
#   make main-path the functions and files of a training step's way, into docs/main-path.md
#
# PYTHON is what the virtual environment is made with, VENV where it is made. The demo is on RANKS
# ranks; tests run in WORKERS processes: three keep two cores busy, since tests also wait; one that
# has no more takes from the others, so that all end together. ARGS are passed on, as in: make demo
# ARGS="--steps 20", make test ARGS="-k ddp". A debugger needs the terminal: make test WORKERS=0
# ARGS="--pdb -k ddp"; a test that runs on several backends at a time is, with -k, one test for each,
# as in -k "test_barrier and tcp".
#
# Bytecode is kept, also where the environment says that none is written: the tests start hundreds of
# processes, each of which would compile the package anew.

PYTHON ?= python3
VENV ?= .venv
NEXT_VENV ?= .venv-torch-next
CLIENTS_VENV ?= .venv-clients
BESIDE_VENV ?= .venv-beside
TORCH ?= torch
RANKS ?= 2
WORKERS ?= 3
ARGS ?=
BASE ?= 8165af3
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
CLIENTS_READY := $(CLIENTS_VENV)/.ready
BESIDE_READY := $(BESIDE_VENV)/.ready
OTHERS ?= accelerate deepspeed torchft hivemind
DEBIAN := slurmctld slurmd slurm-client chromium

.PHONY: demo test test-quick test-torch-next test-clients recipes lint docs format bench stress exact blame torch-blame bad-days fuzz flood attack \
	wide two-hosts links kill-saves notices combinations fence mutants elastic elastic-costs soak agreement torch device loss-against-bytes slow-link pipeline-bubble thresholds numbers beside gate \
	main-path clean

demo: $(READY)
	$(BIN)/phalanx run -n $(RANKS) examples/train_language_model.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

QUICK := $(addprefix tests/,aggregation backends checkpoint collectives compression parallel \
	training wire test_layers.py)

EXACT := $(wildcard tests/parallel/test_*join*.py) tests/training/test_batch_sampler.py

test-quick: $(READY)
	PHALANX_TESTS_QUICK=1 $(BIN)/python -m pytest --numprocesses 0 $(QUICK) $(ARGS)

test-torch-next:
	$(PYTHON) -m venv $(NEXT_VENV)
	$(NEXT_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade '$(TORCH)'
	grep -v '^torch==' constraints.txt > $(NEXT_VENV)/constraints.txt
	$(NEXT_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
		--constraint $(NEXT_VENV)/constraints.txt --editable '.[test]'
	$(NEXT_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/torch_backend $(ARGS)

test-clients: $(CLIENTS_READY)
	$(CLIENTS_VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/clients $(ARGS)

recipes: $(CLIENTS_READY)
	$(CLIENTS_VENV)/bin/python -m pytest tests/examples/test_recipes.py tests/clients/test_recipe_commands.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)
	$(BIN)/phalanx bench $(ARGS)

stress: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/stress/run.py $(ARGS)

exact: $(READY)
	PHALANX_TESTS_LONG=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(EXACT) $(ARGS)

blame: $(READY)
	$(BIN)/python tests/scripts/blame.py $(ARGS)

torch-blame: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/torch_backend/torch_blame.py $(ARGS)

bad-days: $(READY)
	$(BIN)/python tests/scripts/launcher_bad_days.py $(ARGS)

fuzz: $(READY)
	$(BIN)/python tests/wire/wire_fuzz.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/backends/link_fuzz.py $(ARGS)

flood: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/backends/acceptor_flood.py $(ARGS)

attack: $(READY)
	$(BIN)/python tests/attacks/run.py $(ARGS)

wide: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/wide.py $(ARGS)

two-hosts: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/two_hosts.py $(ARGS)
	$(BIN)/python tests/torch_backend/torch_two_hosts.py

links: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/links.py $(ARGS)

elastic: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/elastic_rows.py $(ARGS)

elastic-costs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/elastic_costs.py $(ARGS)

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/elastic_soak.py $(ARGS)

kill-saves: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/kill_saves.py $(ARGS)

notices: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/notices.py $(ARGS)

combinations: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/combinations/run.py $(ARGS)

fence: $(READY)
	$(BIN)/python tests/scripts/fence.py --numprocesses $(WORKERS) --dist worksteal $(ARGS)

mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/mutants.py $(ARGS)

agreement: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/agreement.py $(ARGS)

torch: $(READY)
	$(BIN)/python tests/torch_backend/torch_ways.py
	$(BIN)/python tests/torch_backend/torch_power_sgd.py $(ARGS)

device: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/device.py $(ARGS)

loss-against-bytes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loss_against_bytes.py $(ARGS)

slow-link: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/slow_link.py $(ARGS)

pipeline-bubble: $(READY)
	MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=4000000000 \
		$(BIN)/phalanx run -n 2 benchmarks/pipeline_bubble.py $(ARGS)

thresholds: $(READY)
	$(BIN)/python benchmarks/shm_thresholds.py $(ARGS)

numbers: $(READY)
	$(BIN)/python benchmarks/write_numbers.py $(ARGS)

beside: $(BESIDE_READY)
	$(BESIDE_VENV)/bin/python benchmarks/beside_others.py $(ARGS)

gate: $(READY)
	$(BIN)/python benchmarks/gate.py --base $(BASE) $(ARGS)

main-path: $(READY)
	$(BIN)/python benchmarks/main_path.py > docs/main-path.md.new
	mv docs/main-path.md.new docs/main-path.md

# torch first and by itself: as a dependency of something else it could be another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
		--constraint constraints.txt --editable '.[test,lint]'
	touch $@

# Of most of these packages few modules are imported: compiling all would take a minute.
$(CLIENTS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		"$$(grep '^torch==' constraints.txt)"
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		--constraint constraints.txt --editable '.[test,clients]'
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! { command -v slurmctld && command -v chromium; } > /dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(DEBIAN) \
			|| echo "without $(DEBIAN): the tests that need them are skipped"; fi
	touch $@

$(BESIDE_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BESIDE_VENV)
	$(BESIDE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		"$$(grep '^torch==' constraints.txt)"
	$(BESIDE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		--constraint constraints.txt --editable .
	for other in $(OTHERS); do \
		$(BESIDE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
			--constraint constraints.txt $$other || echo "without $$other"; done
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
		--constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(NEXT_VENV) $(CLIENTS_VENV) $(BESIDE_VENV) build site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
