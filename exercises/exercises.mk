# exercises.mk - the exercises: threads as ranks on the simulated GPU, whatever DEVICE says. exercises/README.md
EX := build/exercises$(EX_SUFFIX)
EX_MAKE := $(MAKE) CXX=$(CXX) DEPS=$(DEPS) DEVICE=cpu RINGTRON_SETUP_DONE=1
EX_SLUGS := $(shell sed -n 's/^\([a-z0-9-]*\) | .*/\1/p' exercises/manifest)
EX_CXXFLAGS := -std=c++20 -g1 -Wall -Wextra -Wno-unused -Wno-unused-parameter -ffunction-sections -MMD -MP -Isrc/sim/include $(DEPS_FLAGS) $(EX_SANITIZE)
EX_LIBRARY := $(patsubst %.cpp,$(EX)/%.o,src/device.cpp src/trace.cpp src/group.cpp src/world.cpp $(wildcard src/sim/*.cpp) \
  $(filter-out %transport_mpi.cpp,$(wildcard src/sim/nccl/*.cpp)) exercises/harness/check.cpp exercises/harness/main.cpp)
# What no exercise calls (the timeline's files, JSON) is left out at the link.
EX_LDLIBS := -Wl,--gc-sections -lopenblas -lpthread $(EX_SANITIZE)
EX_BIN := $(EX_SLUGS:%=$(EX)/bin/%)
EX_SH := EX=$(EX) CXX=$(CXX) MAKE="$(EX_MAKE)" exercises/harness/exercise.sh

.PHONY: ex progress watch ex-prove ex-skeletons
ifneq ($(if $(RINGTRON_SETUP_DONE),,$(NEEDED)),)
ex progress watch ex-prove $(EX_SLUGS:%=ex-%): setup
	@$(MAKE) RINGTRON_SETUP_DONE=1 $@
else
ex:              ## the next exercise: build, check, say what is wrong (ex-<slug>, hint-<slug>, solution-<slug>, reset-<slug>)
	@$(EX_SH) next
progress:        ## which exercises are solved
	@$(EX_SH) progress
watch:           ## check the next exercise each time a file changes
	@$(EX_SH) watch
ex-prove:        ## prove the exercises: skeletons fail, solutions pass, each typical mistake is named
	@EX=$(EX) CXX=$(CXX) MAKE="$(EX_MAKE)" exercises/harness/prove.sh
$(EX_SLUGS:%=ex-%): ex-%: FORCE
	@$(EX_SH) one $*
endif
ex-skeletons:    # writes exercises/<slug>.cpp anew from exercises/src; what you wrote is kept in <slug>.cpp.backup1, 2, ...
	@$(EX_SH) skeletons
$(EX_SLUGS:%=hint-%): hint-%: FORCE
	@$(EX_SH) hint $* $(or $(LEVEL),1)
$(EX_SLUGS:%=solution-%): solution-%: FORCE
	@FORCE=$(filter 1,$(FORCE)) $(EX_SH) solution $*
$(EX_SLUGS:%=reset-%): reset-%: FORCE
	@$(EX_SH) reset $*

# ---- rules ----
$(EX)/src/%.o: src/%.cpp
	@mkdir -p $(@D) && echo "  $(notdir $(CXX))  $<"
	@$(CXX) $(EX_CXXFLAGS) -O1 -c $< -o $@
$(EX)/exercises/%.o: exercises/%.cpp
	@mkdir -p $(@D) && echo "  $(notdir $(CXX))  $<"
	@$(CXX) $(EX_CXXFLAGS) -O0 -c $< -o $@
# A precompiled header makes the hundred variants of prove.sh five times as fast to compile (g++ only).
EX_PCH := $(if $(findstring clang,$(CXX)),,$(EX)/pch/exercises.h.gch)
$(EX)/pch/exercises.h.gch: exercises/exercises.h $(wildcard src/*.h)
	@mkdir -p $(@D) && $(CXX) $(EX_CXXFLAGS) -O0 -w -x c++-header $< -o $@
$(EX)/prove/%.o: build/exercises/prove/%.cpp $(EX_PCH)  # one variant of an exercise, made by prove.sh
	@mkdir -p $(@D) && $(CXX) $(EX_CXXFLAGS) -I$(EX)/pch -Iexercises -O0 -c $< -o $@
$(EX)/libexercises.a: $(EX_LIBRARY)
	@rm -f $@ && ar rcs $@ $^
$(EX_BIN): $(EX)/bin/%: $(EX)/exercises/%.o $(EX)/exercises/checks/%.o $(EX)/libexercises.a
	@mkdir -p $(@D) && $(CXX) $^ -o $@ $(EX_LDLIBS)
define EX_VARIANTS
$(EX)/prove/$(1)--%: $(EX)/prove/$(1)--%.o $(EX)/exercises/checks/$(1).o $(EX)/libexercises.a
	@$$(CXX) $$^ -o $$@ $(EX_LDLIBS)
endef
$(foreach slug,$(EX_SLUGS),$(eval $(call EX_VARIANTS,$(slug))))
.SECONDARY: $(EX_SLUGS:%=$(EX)/exercises/%.o) $(EX_SLUGS:%=$(EX)/exercises/checks/%.o)
-include $(shell find $(EX) -name '*.d' 2>/dev/null)
