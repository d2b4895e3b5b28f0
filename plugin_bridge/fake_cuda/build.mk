# Builds NCCL's host code, unchanged, and the CUDA below it that has no GPU. Run in the src folder of an NCCL tree:
#
#     make -C NCCL/src -f .../fake_cuda/build.mk OURS=.../plugin_bridge OUT=... CUDA_INC=... CUDA_VERSION=13.0
#
# NCCL's own Makefile says which files it is made of and with which flags, so that releases may differ. Nothing is written
# into the tree.
BUILDDIR := $(OUT)/nccl
CUDARTLIB := cudart
# No nvcc: its architectures are for device code, which is not built.
NVCC_GENCODE := none
include Makefile

FAKE := $(OURS)/fake_cuda
GPU := $(OURS)/gpu
OPTIMISE ?= -O1
FLAGS := $(filter-out -O% -g -ggdb%,$(CXXFLAGS)) $(OPTIMISE) -w
INCLUDES := -I. -I$(INCDIR) -I$(OBJDIR)/include -Iinclude -I$(INCPLUGIN) -I$(DOCA_HOME)/include -I$(DOCA_HOME)/src
WARNINGS := -Wall -Wextra -Werror
CUDA_SONAME := libcudart.so.$(firstword $(subst ., ,$(CUDA_VERSION)))

NCCL_OBJECTS := $(LIBSRCFILES:%.cc=$(OUT)/host/%.o) $(DOCA_LIBSRC:%.cpp=$(OUT)/host/doca/%.o)
TABLES := $(OUT)/tables/host_table.o $(OUT)/tables/symmetric/sym_kernels_host.o
FAKE_OBJECTS := $(addprefix $(OUT)/fake/,memory.o runtime.o runtime_memory.o runtime_graphs.o \
    driver.o driver_memory.o fifo.o nvml.o kernel.o \
    device.o stream.o event.o graph.o comms.o player.o play.o times.o meeting.o log.o)
FAKE_HEADERS := $(wildcard $(FAKE)/*.h $(GPU)/*.h)

.DEFAULT_GOAL := $(OUT)/ready
$(OUT)/ready: $(OUT)/libnccl.so.2 $(OUT)/libnvidia-ml.so.1 $(OUT)/libcuda.so.1 $(OUT)/libnccl-net-fake.so
	touch $@

# ---- NCCL ----

$(OUT)/host/%.o: %.cc $(INCTARGETS) $(GIT_VERSION_FILE)
	@mkdir -p $(@D)
	$(CXX) $(INCLUDES) $(FLAGS) -c $< -o $@

$(OUT)/host/doca/%.o: $(DOCA_HOME)/src/%.cpp $(INCTARGETS)
	@mkdir -p $(@D)
	$(CXX) $(INCLUDES) $(FLAGS) -c $< -o $@

$(OUT)/tables/host_table.cc:
	@mkdir -p $(@D)
	PYTHONDONTWRITEBYTECODE=1 $(PYTHON) device/generate.py $(@D) ""

$(OUT)/tables/symmetric/sym_kernels_host.cc: $(OUT)/tables/host_table.cc
	@mkdir -p $(@D)
	PYTHONDONTWRITEBYTECODE=1 $(PYTHON) device/symmetric/generate.py $(@D)

$(TABLES): %.o: %.cc $(INCTARGETS)
	$(CXX) $(INCLUDES) $(FLAGS) -c $< -o $@

$(OUT)/tables/stubs.o: $(TABLES) $(FAKE)/tables.py
	nm -u $(TABLES) > $(OUT)/tables/undefined
	$(PYTHON) $(FAKE)/tables.py stubs $(OUT)/tables/undefined > $(OUT)/tables/stubs.s
	$(CXX) -c $(OUT)/tables/stubs.s -o $@

$(OUT)/tables/one_rank.o: $(FAKE)/one_rank.cc $(INCTARGETS)
	$(CXX) $(INCLUDES) $(FLAGS) -c $< -o $@

$(OUT)/libnccl.so.2: $(NCCL_OBJECTS) $(TABLES) $(OUT)/tables/stubs.o $(OUT)/tables/one_rank.o $(OUT)/$(CUDA_SONAME)
	$(CXX) -shared -o $@ -Wl,-soname,libnccl.so.2 -Wl,--version-script=libnccl.map -Wl,-rpath,'$$ORIGIN' -Wl,--no-undefined \
	    $(filter %.o,$^) $(OUT)/$(CUDA_SONAME) -lpthread -lrt -ldl

# ---- the CUDA below it ----

$(OUT)/tables/functions.inc: $(OUT)/tables/host_table.cc $(FAKE)/tables.py
	$(PYTHON) $(FAKE)/tables.py functions $< > $@

HAS_BCAST := $(if $(shell grep -l ncclDevWorkTypeBcast include/device.h),-DDYNAMICCL_HAS_BCAST_WORK)
NCCL_HEADERS_OF := $(OUT)/fake/kernel.o $(OUT)/fake/nvml.o $(OUT)/fake/net.o
$(NCCL_HEADERS_OF): FAKE_FLAGS := $(INCLUDES) $(FLAGS) $(HAS_BCAST) -I$(OUT)/tables
$(OUT)/fake/kernel.o: $(OUT)/tables/functions.inc
$(NCCL_HEADERS_OF): $(INCTARGETS)

$(OUT)/fake/%.o: $(FAKE)/%.cc $(FAKE_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(or $(FAKE_FLAGS),-std=c++17 -O2 -fPIC -fvisibility=hidden $(WARNINGS) -I$(CUDA_INC)) $(SANITIZE) -c $< -o $@

$(OUT)/fake/%.o: $(GPU)/%.c $(FAKE_HEADERS)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 -g -fPIC $(WARNINGS) $(SANITIZE) -c $< -o $@

$(OUT)/$(CUDA_SONAME): $(FAKE_OBJECTS)
	$(CXX) -shared -o $@ -Wl,-soname,$(CUDA_SONAME) $(SANITIZE) $^ -lpthread -lm

$(OUT)/libnvidia-ml.so.1 $(OUT)/libcuda.so.1: $(OUT)/$(CUDA_SONAME)
	ln -sf $(CUDA_SONAME) $@

$(OUT)/libnccl-net-fake.so: $(OUT)/fake/net.o
	$(CXX) -shared -o $@ $(SANITIZE) $^
