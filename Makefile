# `make demo` and `make test` do all of their own set-up on a fresh machine.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

CC ?= gcc
LIB ?= plugin_bridge/lib
NATIVE := plugin_bridge/native
CFLAGS := -std=c11 -O2 -g -Wall -Wextra -Werror
PLUGIN_SRC := $(addprefix $(NATIVE)/,table.c segment.c static_table.c comm.c govern.c decide.c join.c calls.c coll_start.c children.c measure.c tuner.c profiler.c)
READER_SRC := $(addprefix $(NATIVE)/,table.c reader.c inband.c boundary.c bench.c)
JOB_SRC := $(wildcard plugin_bridge/job_host/*.c)
BENCH_SRC := $(wildcard plugin_bridge/plugin_bench/*.c)
IDLE_SRC := plugin_bridge/idle_profiler/profiler.c
GPU_SRC := $(wildcard plugin_bridge/gpu/*.c)
EMULATED := plugin_bridge/emulated_nccl
EMULATED_SRC := $(wildcard $(EMULATED)/*.c)
FAKE_SRC := $(wildcard plugin_bridge/fake_cuda/*.cc)
HEADERS := $(wildcard $(addprefix plugin_bridge/,native/*.h job_host/*.h plugin_bench/*.h gpu/*.h emulated_nccl/*.h))
C_FILES := $(HEADERS) $(NATIVE)/*.c $(JOB_SRC) $(BENCH_SRC) $(IDLE_SRC) $(GPU_SRC) $(EMULATED_SRC) $(FAKE_SRC) $(wildcard plugin_bridge/fake_cuda/*.h tests/plugin_bridge/native/*.c tests/plugin_bridge/native/stress/*.[ch] tests/real_nccl/native/*.[ch] tests/fuzz/*.[ch])
STRESS_SRC := $(wildcard tests/plugin_bridge/native/stress/*.c)

.PHONY: demo train test test-all acceptance schema model fuzz sanitize soak real-nccl gpu native lint format docs venv clean

demo: $(VENV)/ready
	$(BIN)/dynamiccl demo

train: $(VENV)/ready
	$(BIN)/dynamiccl train experiments/curricula/default.yaml --runners 1 --out runs/default

test: $(VENV)/ready
	RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/ready
	RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -m ""

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	files=$$(find -L dynamiccl_ray -name '*.py' | wc -l); \
	    $(BIN)/mypy | tee /dev/stderr | grep -q "no issues found in $$files source files"

# The site, in build/site; warnings are errors.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 RAY_AUTH_MODE=disabled $(BIN)/python -m mkdocs build --strict --quiet

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

venv: $(VENV)/ready

$(VENV)/ready: pyproject.toml setup.py constraints.txt $(PLUGIN_SRC) $(READER_SRC) $(JOB_SRC) $(BENCH_SRC) $(IDLE_SRC) $(EMULATED_SRC) $(GPU_SRC) $(HEADERS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

# One shared object under both of the names that NCCL looks for.
native: $(LIB)/libnccl-tuner-dynamiccl.so $(LIB)/libnccl-profiler-dynamiccl.so $(LIB)/libdynamiccl-channel.so \
	$(LIB)/dynamiccl-nccl-job $(LIB)/dynamiccl-plugin-bench $(LIB)/libnccl-profiler-idle.so \
	$(LIB)/libnccl-emulated.so

# NCCL closes the plugin with its last communicator; what is recycled for the next must stay (nodelete).
$(LIB)/libnccl-tuner-dynamiccl.so: $(PLUGIN_SRC) $(HEADERS)
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) $(SANITIZE) -fPIC -fvisibility=hidden -shared -Wl,-z,nodelete -o $@ $(PLUGIN_SRC)

$(LIB)/libnccl-profiler-dynamiccl.so: $(LIB)/libnccl-tuner-dynamiccl.so
	ln -sf libnccl-tuner-dynamiccl.so $@

$(LIB)/libdynamiccl-channel.so: $(READER_SRC) $(HEADERS)
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) -fPIC -shared -o $@ $(READER_SRC)

$(LIB)/dynamiccl-nccl-job: $(JOB_SRC) $(HEADERS)
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) $(SANITIZE) -o $@ $(JOB_SRC) -ldl -lpthread -lm

$(LIB)/dynamiccl-plugin-bench: $(BENCH_SRC) $(HEADERS)
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) $(SANITIZE) -o $@ $(BENCH_SRC) -ldl

$(LIB)/libnccl-profiler-idle.so: $(IDLE_SRC) $(HEADERS)
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) $(SANITIZE) -fPIC -fvisibility=hidden -shared -o $@ $(IDLE_SRC)

$(LIB)/libnccl-emulated.so: $(EMULATED_SRC) $(GPU_SRC) $(HEADERS) $(EMULATED)/exports.map
	mkdir -p $(LIB)
	$(CC) $(CFLAGS) $(SANITIZE) -fPIC -shared -Wl,--version-script=$(EMULATED)/exports.map -o $@ \
	    $(EMULATED_SRC) $(GPU_SRC) -ldl -lpthread -lm

# On a GPU, which ranks share if there are fewer than ranks: docs/gpu.md. NCCL 2.30 or later.
gpu: $(VENV)/ready native
	test -n "$(NCCL_LIB)" || { echo "gpu: name NCCL's library, of 2.30 or later: make gpu NCCL_LIB=libnccl.so.2"; exit 2; }
	NCCL_LIB="$(NCCL_LIB)" $(BIN)/python -m pytest -q -m gpu tests/gpu

# The demo as a newcomer runs it, and its promises checked.
acceptance: $(VENV)/ready
	RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -q -m "" tests/test_demo.py

# What editors check YAML files with, from the same models that read them.
SCHEMAS := dynamiccl_ray/data/schema
schema: $(VENV)/ready
	mkdir -p $(SCHEMAS)
	for kind in experiment curriculum sweep cluster workload trace; do \
	    $(BIN)/dynamiccl schema $$kind > $(SCHEMAS)/$$kind.json || exit 1; done

# The agreement as a model, over all of its states: docs/agreement_model.md. Needs spin and gcc, and nothing of ours.
model:
	python3 model/check.py

# The plugin and the reader under inputs that libFuzzer makes up: docs/fuzzing.md. Needs clang, and nothing of ours.
RUNS ?= 10000000
fuzz:
	python3 tests/fuzz/targets.py --runs $(RUNS) $(TARGETS)

# The plugin, the emulated NCCL that drives it and a threaded stress test of both ends of the channel, under each sanitizer.
sanitize: $(VENV)/ready
	for s in address,undefined thread; do \
	    dir=build/$$s && mkdir -p $$dir && \
	    $(MAKE) --no-print-directory native LIB=$$dir SANITIZE="-fsanitize=$$s -fno-sanitize-recover=all" && \
	    $(CC) $(CFLAGS) -DDCC_STRESS -fsanitize=$$s -fno-sanitize-recover=all -I$(NATIVE) -o $$dir/stress $(STRESS_SRC) \
	        $(PLUGIN_SRC) $(NATIVE)/reader.c -lpthread && \
	    $$dir/stress && \
	    DYNAMICCL_NATIVE_DIR=$$dir $(BIN)/python -m pytest -q tests/plugin_bridge/test_plugin.py tests/plugin_bridge/test_govern.py || exit 1; \
	done

# Everything is killed and stopped at random, MINUTES on the emulated NCCL and on each of NCCL_SRC: docs/soak.md.
MINUTES ?= 6
soak: $(VENV)/ready native
	$(BIN)/python tests/soak/soak.py --minutes $(MINUTES) $(patsubst %,--nccl %,$(subst :, ,$(NCCL_SRC)))

# The plugin under NCCL's own host code. NCCL_SRC: trees or tarballs of NCCL, separated by colons; each is built once.
NCCL_SRC ?=
real-nccl: $(if $(NCCL_SRC),$(VENV)/ready native)
ifeq ($(NCCL_SRC),)
	@echo "real-nccl: skipped, no sources of NCCL were named: make real-nccl NCCL_SRC=DIR_OR_TARBALL[:...]"
else
	NCCL_SRC="$(NCCL_SRC)" $(BIN)/python -m pytest -q -m real_nccl --color=yes tests/real_nccl || \
	    { echo "real-nccl: once more, what failed: proxy threads may have had no time"; \
	    NCCL_SRC="$(NCCL_SRC)" $(BIN)/python -m pytest -q -m real_nccl --color=yes --last-failed tests/real_nccl; }
endif

clean:
	rm -rf $(VENV) build $(LIB) *.egg-info
