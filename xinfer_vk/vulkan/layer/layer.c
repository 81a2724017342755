/* The companion layer: what Kompute 0.9 leaves out, added between it and the driver.
 *
 * A Vulkan layer is a shared library that the loader puts in the path of every Vulkan call. Each
 * function below that bears a Vulkan name is called in the driver's place, does its part, and calls
 * the next one down. Python enables this layer for its own process (layer.py writes the manifest) and
 * talks to it through the xinfer_* functions at the end, by ctypes. Kompute knows nothing of it.
 *
 *   1. Barriers. Kompute orders transfers before dispatches, but never one dispatch before another.
 *      Its own barriers are dropped, and one correct memory barrier goes before each dispatch, unless
 *      the recorder said that the dispatch is independent of those before it.
 *   2. Features. Kompute enables none; we enable those on the list below that the device has. On CPU devices
 *      buffers have addresses, which xinfer_newest_address tells.
 *   3. Errors. Kompute ignores most results and goes on with null handles, which crash the driver.
 *      The first failure on a device is kept; until Python has read it, further creations fail too,
 *      and null handles stop here. So kp's constructors return or throw, and Python can say why.
 *   4. One pipeline cache for all pipelines, whose bytes Python loads and saves, and one layout for all
 *      kernels that have as many buffers and push constants.
 *   5. Counters, and a GPU timestamp per dispatch where wanted.
 *
 * Threads: the lists are locked; one device is used by one thread at a time (kp's own rule). A call by
 * xinfer_* may come at any time: while it works on a device, vkDestroyDevice waits for it.
 *
 * Vulkan sections cited: 7.1 execution and memory dependencies, 7.9 host write ordering guarantees,
 * 18.2 timestamps (numbers of the 1.3 specification); "Architecture of the Vulkan Loader Interfaces".
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

#define ABI_VERSION 7 /* layer.py refuses a library that says otherwise: raise both together */
#define EXPORT __attribute__((visibility("default")))

/* Headers before 1.3.255 (Debian 12) lack VK_KHR_cooperative_matrix; its numbers are the registry's. */
#ifndef VK_KHR_cooperative_matrix
#define VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME "VK_KHR_cooperative_matrix"
#define VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR ((VkStructureType)1000506000)
typedef struct {
    VkStructureType sType;
    void *pNext;
    VkBool32 cooperativeMatrix, cooperativeMatrixRobustBufferAccess;
} VkPhysicalDeviceCooperativeMatrixFeaturesKHR;
typedef struct {
    VkStructureType sType;
    void *pNext;
    uint32_t MSize, NSize, KSize;
    int32_t AType, BType, CType, ResultType;
    VkBool32 saturatingAccumulation;
    int32_t scope;
} VkCooperativeMatrixPropertiesKHR;
typedef VkResult(VKAPI_PTR *PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR)(
    VkPhysicalDevice, uint32_t *, VkCooperativeMatrixPropertiesKHR *);
#define VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR ((VkStructureType)1000506001)
#define VK_COMPONENT_TYPE_FLOAT16_KHR 0
#define VK_COMPONENT_TYPE_FLOAT32_KHR 1
#define VK_SCOPE_SUBGROUP_KHR 3
#endif

/* ------------------------------------------------------------------------------------ the state -- */

/* Every device function we call: X(Name) makes a pointer `Name` in Device, fetched as vkName. */
#define NEXT_FUNCTIONS(X)                                                                                \
    X(DestroyDevice) X(QueueSubmit) X(WaitForFences) X(GetFenceStatus) X(CreateFence) X(AllocateMemory)     \
    X(FreeMemory)                                                                                        \
    X(MapMemory) X(FlushMappedMemoryRanges) X(CreateBuffer) X(DestroyBuffer)                             \
    X(GetBufferMemoryRequirements) X(BindBufferMemory) X(CreateDescriptorPool) X(DestroyDescriptorPool)  \
    X(CreateDescriptorSetLayout) X(DestroyDescriptorSetLayout) X(AllocateDescriptorSets)                 \
    X(UpdateDescriptorSets) X(CreateShaderModule) X(DestroyShaderModule) X(CreatePipelineLayout)         \
    X(DestroyPipelineLayout) X(CreatePipelineCache) X(DestroyPipelineCache) X(GetPipelineCacheData)      \
    X(CreateComputePipelines) X(CreateCommandPool) X(DestroyCommandPool) X(AllocateCommandBuffers)       \
    X(FreeCommandBuffers) X(BeginCommandBuffer) X(EndCommandBuffer) X(CmdPipelineBarrier) X(CmdDispatch) \
    X(CmdCopyBuffer) X(CreateQueryPool) X(DestroyQueryPool) X(CmdResetQueryPool) X(CmdWriteTimestamp)    \
    X(GetQueryPoolResults) X(GetBufferDeviceAddressKHR)

typedef struct Instance {
    struct Instance *next;
    const void *key;
    VkInstance handle;
    PFN_vkGetInstanceProcAddr GetInstanceProcAddr;
    PFN_vkDestroyInstance DestroyInstance;
} Instance;

typedef struct Allocation {
    struct Allocation *next;
    VkDeviceMemory memory;
    uint64_t bytes;
} Allocation;

/* What is known of one command buffer. The list of a device is kept most recently used first. */
typedef struct Recording {
    struct Recording *next;
    VkCommandBuffer commands;
    VkCommandPool pool;
    uint64_t id;         /* names the recording to Python; 0 before it has begun */
    uint64_t dispatches; /* recorded since vkBeginCommandBuffer */
    uint64_t barriers;
    bool transfers;      /* a copy has been recorded */
    VkQueryPool queries; /* null unless timed: query 0 at the start, query i after dispatch i */
    uint32_t query_count, queries_written;
} Recording;

/* The first failure since Python last looked. Mirrored by layer.py. */
typedef struct {
    int32_t result; /* a VkResult, 0 if none */
    uint32_t reserved;
    uint64_t size;  /* bytes, where the call was about memory */
    char function[48];
} Failure;

/* Mirrored by layer.py. "recorded" counts what went into command buffers, "run" what was submitted. */
typedef struct {
    uint64_t dispatches_recorded, barriers_recorded, barriers_dropped;
    uint64_t dispatches_run, barriers_run, submits;
    uint64_t bytes, peak_bytes, allocations;
    uint64_t pipelines, pipelines_full; /* the latter with full subgroups */
    uint64_t layouts;                   /* of sets and of pipelines, those that the driver made */
    uint64_t submit_ns, wait_ns; /* in vkQueueSubmit, in waiting for fences */
} Counters;

/* A layout that kernels share: of descriptor sets with so many buffers (`pipeline` is null), or of pipelines
 * with such a set and so many bytes of push constants. */
typedef struct Layout {
    struct Layout *next;
    VkDescriptorSetLayout set;
    VkPipelineLayout pipeline;
    uint32_t size;
} Layout;

/* What kp has made of the algorithm it is making. */
typedef struct {
    VkDescriptorPool pool;
    VkDescriptorSetLayout set_layout;
    VkShaderModule shader;
    VkPipelineLayout layout;
    VkPipelineCache cache;
} Unfinished;

typedef struct Device {
    struct Device *next;
    const void *key;
    uint32_t calls; /* of xinfer_* that are working on it */
    uint64_t id;    /* names the device to Python; never used twice */
    VkDevice handle;
    PFN_vkGetDeviceProcAddr GetDeviceProcAddr;
#define DECLARE(name) PFN_vk##name name;
    NEXT_FUNCTIONS(DECLARE)
    uint8_t uuid[VK_UUID_SIZE];
    uint32_t features; /* FEATURE_* that are on */
    VkPhysicalDeviceMemoryProperties memory;
    uint64_t poll_ns; /* how long a fence is looked at before the thread sleeps on it */
    Failure failure;
    Counters counters;
    Allocation *allocations;
    uint32_t type_bits;    /* memory types that the buffer asked about last can have */
    VkBuffer bound_buffer; /* what was bound last, and to what */
    VkDeviceMemory bound_memory;
    Unfinished unfinished;
    Layout *layouts;
    Recording *recordings;
    uint64_t recording_count; /* recordings ever begun: the newest one's id */
    VkPipelineCache cache;    /* null until Python opens it */

    /* Set by Python */
    bool barriers_off;         /* to show that validation sees their lack */
    bool next_is_independent;  /* for the next dispatch only */
    uint32_t next_groups[3];   /* for the next dispatch only; 0: as many as it says */
    bool next_is_read_back;    /* for the next allocation only */
    bool next_subgroups_full;  /* for the next pipeline only */
    uint32_t next_query_count; /* for the next command buffer only */
} Device;

enum { MAX_INJECTIONS = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, and of Device.calls */
static pthread_cond_t call_ended = PTHREAD_COND_INITIALIZER;
static Instance *instances;
static Device *devices;
static uint64_t device_count;                /* devices ever made */
static _Thread_local uint64_t newest_device; /* the id of the last one this thread made */

/* The loader stores a pointer to its dispatch table at the start of each dispatchable object; an
 * instance shares it with its physical devices, a device with its queues and command buffers. */
static const void *key_of(const void *dispatchable) { return *(const void *const *)dispatchable; }

static Instance *instance_of(const void *dispatchable)
{
    const void *key = key_of(dispatchable);
    pthread_mutex_lock(&lock);
    Instance *found = instances;
    while (found && found->key != key)
        found = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

static Device *device_of(const void *dispatchable)
{
    const void *key = key_of(dispatchable);
    pthread_mutex_lock(&lock);
    Device *found = devices;
    while (found && found->key != key)
        found = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* `d`, the device of a call; one that is not known (it was destroyed) ends the call. */
#define DEVICE_OF(dispatchable, ...)           \
    Device *const d = device_of(dispatchable); \
    if (!d)                                    \
        return __VA_ARGS__

/* The device with an id, which stays until `release`. */
static Device *acquire(uint64_t id)
{
    pthread_mutex_lock(&lock);
    Device *found = devices;
    while (found && found->id != id)
        found = found->next;
    if (found)
        found->calls++;
    pthread_mutex_unlock(&lock);
    return found;
}

static void release(Device *const *held)
{
    Device *d = *held;
    if (!d)
        return;
    pthread_mutex_lock(&lock);
    if (--d->calls == 0)
        pthread_cond_broadcast(&call_ended);
    pthread_mutex_unlock(&lock);
}

/* `d`, the device with an id, held until the block is left; null if there is none. */
#define ON_DEVICE(id) __attribute__((cleanup(release))) Device *const d = acquire(id)

/* ------------------------------------------------------------------------------------- failures -- */

/* Faults that a test plants: the nth call of a function fails. See xinfer_inject. */
static struct {
    char function[48];
    uint32_t countdown;
    VkResult result;
} injections[MAX_INJECTIONS];

static VkResult injected(const char *function)
{
    VkResult result = VK_SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_INJECTIONS; i++)
        if (injections[i].countdown && !strcmp(injections[i].function, function) &&
            --injections[i].countdown == 0)
            result = injections[i].result;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Of all devices so far. Python reads it after every run: a load, where a call would cost more than the run. */
EXPORT _Atomic uint32_t xinfer_failures;

/* Keeps a failure if it is the first; hands the result on. Positive results are no failures. */
static VkResult keep(Device *d, const char *function, uint64_t size, VkResult result)
{
    if (result < 0 && d->failure.result == 0) {
        d->failure.result = result;
        d->failure.size = size;
        xinfer_failures++;
        strncpy(d->failure.function, function, sizeof d->failure.function - 1);
    }
    return result;
}

/* Asked before a call that creates something: an error if a test planted one or an earlier failure is
 * still unread. kp goes on after a failure it did not notice; what it asks for then must fail too. */
static VkResult refused(Device *d, const char *function, uint64_t size)
{
    if (d->failure.result)
        return d->failure.result;
    return keep(d, function, size, injected(function));
}

/* ----------------------------------------------------------------------------- instance, features -- */

static VKAPI_ATTR VkResult VKAPI_CALL CreateInstance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *allocator, VkInstance *out)
{
    VkLayerInstanceCreateInfo *link = (VkLayerInstanceCreateInfo *)info->pNext;
    while (link && !(link->sType == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO &&
                     link->function == VK_LAYER_LINK_INFO))
        link = (VkLayerInstanceCreateInfo *)link->pNext;
    if (!link)
        return VK_ERROR_INITIALIZATION_FAILED;

    PFN_vkGetInstanceProcAddr next = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext; /* what the layer below will see as its own */
    PFN_vkCreateInstance create = (PFN_vkCreateInstance)next(VK_NULL_HANDLE, "vkCreateInstance");
    if (!create)
        return VK_ERROR_INITIALIZATION_FAILED;
    /* Before the call: after it nothing may fail, because the loader destroys an instance whose making failed. */
    Instance *instance = calloc(1, sizeof *instance);
    if (!instance)
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    VkResult result = create(info, allocator, out);
    if (result != VK_SUCCESS) {
        free(instance);
        return result;
    }
    instance->key = key_of(*out);
    instance->handle = *out;
    instance->GetInstanceProcAddr = next;
    instance->DestroyInstance = (PFN_vkDestroyInstance)next(*out, "vkDestroyInstance");
    pthread_mutex_lock(&lock);
    instance->next = instances;
    instances = instance;
    pthread_mutex_unlock(&lock);
    return VK_SUCCESS;
}

static VKAPI_ATTR void VKAPI_CALL DestroyInstance(VkInstance handle, const VkAllocationCallbacks *allocator)
{
    Instance *instance = handle ? instance_of(handle) : NULL;
    if (!instance)
        return;
    pthread_mutex_lock(&lock); /* first out of the list: the next instance may get the same key */
    Instance **at = &instances;
    while (*at != instance)
        at = &(*at)->next;
    *at = instance->next;
    pthread_mutex_unlock(&lock);
    instance->DestroyInstance(handle, allocator);
    free(instance);
}

/* The bits of Device.features, in the order of layer.py's names. */
enum {
    FEATURE_STORAGE_16BIT = 1 << 0,
    FEATURE_STORAGE_8BIT = 1 << 1,
    FEATURE_FLOAT16 = 1 << 2,
    FEATURE_INT8 = 1 << 3,
    FEATURE_INT16 = 1 << 4,
    FEATURE_INTEGER_DOT_PRODUCT = 1 << 5,
    FEATURE_COOPERATIVE_MATRIX = 1 << 6,
    FEATURE_SUBGROUP_SIZE_CONTROL = 1 << 7,
    FEATURE_BUFFER_ADDRESS = 1 << 8, /* CPU devices only: see matmul_lanes.comp */
};

/* The feature structures we may chain. kp makes its instance for API 1.1, so what later versions took
 * into the core comes as the extension it was, with the extension enabled. */
typedef struct {
    VkPhysicalDeviceFeatures2 core;
    VkPhysicalDevice16BitStorageFeatures storage16;
    VkPhysicalDevice8BitStorageFeaturesKHR storage8;
    VkPhysicalDeviceShaderFloat16Int8FeaturesKHR arithmetic;
    VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR dot;
    VkPhysicalDeviceSubgroupSizeControlFeaturesEXT subgroup;
    VkPhysicalDeviceVulkanMemoryModelFeaturesKHR memory_model; /* which cooperative matrices need */
    VkPhysicalDeviceCooperativeMatrixFeaturesKHR matrix;
    VkPhysicalDeviceBufferDeviceAddressFeaturesKHR address;
} Features;

enum { MAX_EXTENSIONS = 8 };
typedef struct {
    const char *names[MAX_EXTENSIONS];
    uint32_t count;
} Extensions;

static bool offered(const VkExtensionProperties *available, uint32_t count, const char *name)
{
    for (uint32_t i = 0; i < count; i++)
        if (!strcmp(available[i].extensionName, name))
            return true;
    return false;
}

#define INSTANCE_FUNCTION(name) \
    PFN_vk##name name = (PFN_vk##name)instance->GetInstanceProcAddr(instance->handle, "vk" #name)

static const char PORTABILITY_SUBSET[] = "VK_KHR_portability_subset"; /* of devices that lack a part of Vulkan */

static VkExtensionProperties *device_extensions(Instance *instance, VkPhysicalDevice physical, uint32_t *count)
{
    INSTANCE_FUNCTION(EnumerateDeviceExtensionProperties);
    *count = 0;
    if (!EnumerateDeviceExtensionProperties ||
        EnumerateDeviceExtensionProperties(physical, NULL, count, NULL) != VK_SUCCESS)
        return NULL;
    VkExtensionProperties *available = calloc(*count + 1, sizeof *available);
    if (available && EnumerateDeviceExtensionProperties(physical, NULL, count, available) < 0)
        *count = 0;
    return available;
}

static bool offers(Instance *instance, VkPhysicalDevice physical, const char *extension)
{
    uint32_t count;
    VkExtensionProperties *available = device_extensions(instance, physical, &count);
    const bool found = available && offered(available, count, extension);
    free(available);
    return found;
}

/* Adds to a list of `count` names those that it lacks; their number then. */
static uint32_t join(const char **names, uint32_t count, const Extensions *more)
{
    for (uint32_t i = 0; i < more->count; i++) {
        bool known = false;
        for (uint32_t j = 0; j < count; j++)
            known |= !strcmp(names[j], more->names[i]);
        if (!known)
            names[count++] = more->names[i];
    }
    return count;
}

/* Whether a subgroup multiplies 16 x 16 matrices of f16 and adds them up in f32, the shape our shaders use. */
static bool has_matrix_shape(Instance *instance, VkPhysicalDevice physical)
{
    enum { MAX_SHAPES = 64 };
    INSTANCE_FUNCTION(GetPhysicalDeviceCooperativeMatrixPropertiesKHR);
    VkCooperativeMatrixPropertiesKHR shapes[MAX_SHAPES];
    memset(shapes, 0, sizeof shapes);
    for (int i = 0; i < MAX_SHAPES; i++)
        shapes[i].sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR;
    uint32_t count = MAX_SHAPES;
    if (!GetPhysicalDeviceCooperativeMatrixPropertiesKHR ||
        GetPhysicalDeviceCooperativeMatrixPropertiesKHR(physical, &count, shapes) < 0)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        const VkCooperativeMatrixPropertiesKHR *s = &shapes[i];
        if (s->MSize == 16 && s->NSize == 16 && s->KSize == 16 && (int)s->scope == VK_SCOPE_SUBGROUP_KHR &&
            (int)s->AType == VK_COMPONENT_TYPE_FLOAT16_KHR && (int)s->BType == VK_COMPONENT_TYPE_FLOAT16_KHR &&
            (int)s->CType == VK_COMPONENT_TYPE_FLOAT32_KHR &&
            (int)s->ResultType == VK_COMPONENT_TYPE_FLOAT32_KHR)
            return true;
    }
    return false;
}

static bool is_cpu(Instance *instance, VkPhysicalDevice physical)
{
    INSTANCE_FUNCTION(GetPhysicalDeviceProperties);
    VkPhysicalDeviceProperties properties = {0};
    if (GetPhysicalDeviceProperties)
        GetPhysicalDeviceProperties(physical, &properties);
    return properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

/* Fills `f` with what the device supports of our list, ready to be chained into VkDeviceCreateInfo,
 * and `wanted` with the extensions this takes. Returns the FEATURE_* bits. */
static uint32_t supported_features(
    Instance *instance, VkPhysicalDevice physical, Features *f, Extensions *wanted)
{
    INSTANCE_FUNCTION(GetPhysicalDeviceFeatures2);
    memset(f, 0, sizeof *f);
    wanted->count = 0;
    f->core.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    uint32_t count;
    VkExtensionProperties *available =
        GetPhysicalDeviceFeatures2 ? device_extensions(instance, physical, &count) : NULL;
    if (!available)
        return 0;

    void **tail = &f->core.pNext;
#define CHAIN(member, type)                                         \
    do {                                                            \
        f->member.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_##type; \
        *tail = &f->member;                                         \
        tail = (void **)&f->member.pNext;                           \
    } while (0)
#define CHAIN_IF(member, type, extension)           \
    if (offered(available, count, extension)) {     \
        CHAIN(member, type);                        \
        wanted->names[wanted->count++] = extension; \
    }
    CHAIN(storage16, 16BIT_STORAGE_FEATURES); /* core since 1.1, which kp asks for */
    CHAIN_IF(storage8, 8BIT_STORAGE_FEATURES_KHR, VK_KHR_8BIT_STORAGE_EXTENSION_NAME)
    CHAIN_IF(arithmetic, SHADER_FLOAT16_INT8_FEATURES_KHR, VK_KHR_SHADER_FLOAT16_INT8_EXTENSION_NAME)
    CHAIN_IF(dot, SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR, VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME)
    CHAIN_IF(subgroup, SUBGROUP_SIZE_CONTROL_FEATURES_EXT, VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME)
    if (offered(available, count, VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME)) {
        CHAIN_IF(memory_model, VULKAN_MEMORY_MODEL_FEATURES_KHR, VK_KHR_VULKAN_MEMORY_MODEL_EXTENSION_NAME)
        CHAIN_IF(matrix, COOPERATIVE_MATRIX_FEATURES_KHR, VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME)
    }
    if (is_cpu(instance, physical))
        CHAIN_IF(address, BUFFER_DEVICE_ADDRESS_FEATURES_KHR, VK_KHR_BUFFER_DEVICE_ADDRESS_EXTENSION_NAME)
    free(available);
    GetPhysicalDeviceFeatures2(physical, &f->core);

    /* Turn off again what our kernels have no use for: every enabled feature may cost something. */
    VkBool32 int16 = f->core.features.shaderInt16;
    memset(&f->core.features, 0, sizeof f->core.features);
    f->core.features.shaderInt16 = int16;
    f->storage16.storagePushConstant16 = f->storage16.storageInputOutput16 = VK_FALSE;
    f->storage16.uniformAndStorageBuffer16BitAccess = VK_FALSE;
    f->storage8.storagePushConstant8 = f->storage8.uniformAndStorageBuffer8BitAccess = VK_FALSE;
    f->memory_model.vulkanMemoryModelAvailabilityVisibilityChains = VK_FALSE;
    f->matrix.cooperativeMatrixRobustBufferAccess = VK_FALSE;
    f->address.bufferDeviceAddressCaptureReplay = f->address.bufferDeviceAddressMultiDevice = VK_FALSE;

    uint32_t bits = 0;
    bits |= f->storage16.storageBuffer16BitAccess ? FEATURE_STORAGE_16BIT : 0;
    bits |= f->storage8.storageBuffer8BitAccess ? FEATURE_STORAGE_8BIT : 0;
    bits |= f->arithmetic.shaderFloat16 ? FEATURE_FLOAT16 : 0;
    bits |= f->arithmetic.shaderInt8 ? FEATURE_INT8 : 0;
    bits |= int16 ? FEATURE_INT16 : 0;
    bits |= f->dot.shaderIntegerDotProduct ? FEATURE_INTEGER_DOT_PRODUCT : 0;
    if (f->matrix.cooperativeMatrix && f->memory_model.vulkanMemoryModel &&
        has_matrix_shape(instance, physical))
        bits |= FEATURE_COOPERATIVE_MATRIX;
    if (f->subgroup.subgroupSizeControl && f->subgroup.computeFullSubgroups)
        bits |= FEATURE_SUBGROUP_SIZE_CONTROL;
    bits |= f->address.bufferDeviceAddress ? FEATURE_BUFFER_ADDRESS : 0;
    return bits;
}

static void physical_properties(Instance *instance, VkPhysicalDevice physical, Device *d)
{
    INSTANCE_FUNCTION(GetPhysicalDeviceProperties2);
    INSTANCE_FUNCTION(GetPhysicalDeviceMemoryProperties);
    VkPhysicalDeviceIDProperties id = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES};
    VkPhysicalDeviceProperties2 properties = {VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, &id, {0}};
    if (GetPhysicalDeviceProperties2)
        GetPhysicalDeviceProperties2(physical, &properties);
    memcpy(d->uuid, id.deviceUUID, VK_UUID_SIZE);
    /* A CPU device wants the core that polling would keep busy. */
    bool cpu = properties.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    const char *poll = getenv("XINFER_VK_POLL_US");
    d->poll_ns = poll && *poll ? strtoull(poll, NULL, 10) * 1000 : cpu ? 0 : 20000000;
    GetPhysicalDeviceMemoryProperties(physical, &d->memory);
}

/* ---------------------------------------------------------------------------------------- device -- */

static void forget_recording(Device *d, Recording **at)
{
    Recording *r = *at;
    *at = r->next;
    d->DestroyQueryPool(d->handle, r->queries, NULL); /* null is fine */
    free(r);
}

static VKAPI_ATTR VkResult VKAPI_CALL CreateDevice(
    VkPhysicalDevice physical, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *allocator,
    VkDevice *out)
{
    Instance *instance = instance_of(physical);
    VkLayerDeviceCreateInfo *link = (VkLayerDeviceCreateInfo *)info->pNext;
    bool features_chosen = info->pEnabledFeatures != NULL; /* by the application: then ours would clash */
    VkLayerDeviceCreateInfo *found = NULL;
    for (; link; link = (VkLayerDeviceCreateInfo *)link->pNext) {
        if (link->sType == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO) {
            if (link->function == VK_LAYER_LINK_INFO)
                found = link;
        } else {
            features_chosen = true;
        }
    }
    if (!instance || !found)
        return VK_ERROR_INITIALIZATION_FAILED;
    VkLayerDeviceLink *here = found->u.pLayerInfo;
    PFN_vkCreateDevice create =
        (PFN_vkCreateDevice)here->pfnNextGetInstanceProcAddr(instance->handle, "vkCreateDevice");
    Device *d = calloc(1, sizeof *d);
    if (!d || !create) {
        free(d);
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }

    /* First with our features in front of the chain; if the driver will not have them, as asked. */
    Features features;
    Extensions ours = {.count = 0}, required = {.count = 0};
    if (offers(instance, physical, PORTABILITY_SUBSET)) /* the specification: then it must be enabled */
        required.names[required.count++] = PORTABILITY_SUBSET;
    if (!features_chosen)
        d->features = supported_features(instance, physical, &features, &ours);
    VkDeviceCreateInfo extended = *info;
    const char **names = calloc(info->enabledExtensionCount + 2 * MAX_EXTENSIONS, sizeof *names);
    if (!names) {
        free(d);
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
    extended.ppEnabledExtensionNames = names;
    if (info->enabledExtensionCount)
        memcpy(names, info->ppEnabledExtensionNames, info->enabledExtensionCount * sizeof *names);
    const uint32_t as_asked = join(names, info->enabledExtensionCount, &required);
    VkResult result = VK_ERROR_FEATURE_NOT_PRESENT;
    if (d->features) {
        void **tail = &features.core.pNext;
        while (*tail)
            tail = (void **)&((VkBaseOutStructure *)*tail)->pNext;
        *tail = (void *)info->pNext;
        extended.pNext = &features.core;
        extended.enabledExtensionCount = join(names, as_asked, &ours);
        found->u.pLayerInfo = here->pNext;
        result = create(physical, &extended, allocator, out);
    }
    if (result != VK_SUCCESS) {
        d->features = 0;
        extended.pNext = info->pNext;
        extended.enabledExtensionCount = as_asked;
        found->u.pLayerInfo = here->pNext; /* the layers below have moved it on */
        result = create(physical, &extended, allocator, out);
    }
    free(names);
    if (result != VK_SUCCESS) {
        free(d);
        return result;
    }

    d->key = key_of(*out);
    d->handle = *out;
    d->GetDeviceProcAddr = here->pfnNextGetDeviceProcAddr;
#define FETCH(name) d->name = (PFN_vk##name)d->GetDeviceProcAddr(*out, "vk" #name);
    NEXT_FUNCTIONS(FETCH)
    physical_properties(instance, physical, d);
    pthread_mutex_lock(&lock);
    d->id = newest_device = ++device_count;
    d->next = devices;
    devices = d;
    pthread_mutex_unlock(&lock);
    return VK_SUCCESS;
}

static VKAPI_ATTR void VKAPI_CALL DestroyDevice(VkDevice handle, const VkAllocationCallbacks *allocator)
{
    Device *d = handle ? device_of(handle) : NULL;
    if (!d)
        return;
    pthread_mutex_lock(&lock);
    Device **at = &devices;
    while (*at != d)
        at = &(*at)->next;
    *at = d->next; /* from here on no call finds it */
    while (d->calls)
        pthread_cond_wait(&call_ended, &lock);
    pthread_mutex_unlock(&lock);
    while (d->recordings)
        forget_recording(d, &d->recordings);
    while (d->allocations) {
        Allocation *a = d->allocations;
        d->allocations = a->next;
        free(a);
    }
    while (d->layouts) {
        Layout *l = d->layouts;
        d->layouts = l->next;
        if (l->pipeline)
            d->DestroyPipelineLayout(handle, l->pipeline, NULL);
        else
            d->DestroyDescriptorSetLayout(handle, l->set, NULL);
        free(l);
    }
    d->DestroyPipelineCache(handle, d->cache, NULL);
    d->DestroyDevice(handle, allocator);
    free(d);
}

/* ---------------------------------------------------------------------------------------- memory -- */

static VKAPI_ATTR VkResult VKAPI_CALL CreateBuffer(
    VkDevice handle, const VkBufferCreateInfo *info, const VkAllocationCallbacks *allocator, VkBuffer *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    *out = VK_NULL_HANDLE;
    VkBufferCreateInfo extended = *info;
    if (d->features & FEATURE_BUFFER_ADDRESS)
        extended.usage |= VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT_KHR;
    VkResult result = refused(d, "vkCreateBuffer", info->size);
    if (result == VK_SUCCESS)
        result = keep(d, "vkCreateBuffer", info->size, d->CreateBuffer(handle, &extended, allocator, out));
    return result;
}

static VKAPI_ATTR void VKAPI_CALL GetBufferMemoryRequirements(
    VkDevice handle, VkBuffer buffer, VkMemoryRequirements *out)
{
    memset(out, 0, sizeof *out); /* no memory type fits: kp throws */
    DEVICE_OF(handle, );
    if (buffer)
        d->GetBufferMemoryRequirements(handle, buffer, out);
    d->type_bits = out->memoryTypeBits;
}

/* kp takes the first mapped type there is, which on discrete GPUs is not cached: right for what the host
 * only writes, but reading it takes 10 to 100 times as long. This is the type of the same heap that is
 * cached too, among those that `bits` allow, or else the one that was asked for. */
static uint32_t cached_type(const VkPhysicalDeviceMemoryProperties *memory, uint32_t asked, uint32_t bits)
{
    const VkMemoryPropertyFlags wanted = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
        VK_MEMORY_PROPERTY_HOST_COHERENT_BIT | VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    const VkMemoryType *types = memory->memoryTypes;
    for (uint32_t i = 0; i < memory->memoryTypeCount; i++)
        if ((bits >> i & 1) && types[i].heapIndex == types[asked].heapIndex &&
            types[i].propertyFlags == (types[asked].propertyFlags | wanted))
            return i;
    return asked;
}

static VKAPI_ATTR VkResult VKAPI_CALL AllocateMemory(
    VkDevice handle, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *allocator,
    VkDeviceMemory *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    *out = VK_NULL_HANDLE;
    const bool read_back = d->next_is_read_back;
    d->next_is_read_back = false; /* also where this fails: it was said of this allocation alone */
    VkResult result = refused(d, "vkAllocateMemory", info->allocationSize);
    if (result != VK_SUCCESS)
        return result;
    VkMemoryAllocateInfo chosen = *info;
    VkMemoryAllocateFlagsInfo flags = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO, .pNext = info->pNext,
        .flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT_KHR};
    if (d->features & FEATURE_BUFFER_ADDRESS)
        chosen.pNext = &flags;
    if (read_back)
        chosen.memoryTypeIndex = cached_type(&d->memory, info->memoryTypeIndex, d->type_bits);
    Allocation *a = malloc(sizeof *a);
    result = a ? d->AllocateMemory(handle, &chosen, allocator, out) : VK_ERROR_OUT_OF_HOST_MEMORY;
    if (result < 0 && a && chosen.memoryTypeIndex != info->memoryTypeIndex) {
        chosen.memoryTypeIndex = info->memoryTypeIndex;
        result = d->AllocateMemory(handle, &chosen, allocator, out);
    }
    if (result != VK_SUCCESS) {
        free(a);
        return keep(d, "vkAllocateMemory", info->allocationSize, result);
    }
    *a = (Allocation){d->allocations, *out, info->allocationSize};
    d->allocations = a;
    d->counters.allocations++;
    d->counters.bytes += a->bytes;
    if (d->counters.bytes > d->counters.peak_bytes)
        d->counters.peak_bytes = d->counters.bytes;
    return VK_SUCCESS;
}

static VKAPI_ATTR void VKAPI_CALL FreeMemory(
    VkDevice handle, VkDeviceMemory memory, const VkAllocationCallbacks *allocator)
{
    DEVICE_OF(handle, );
    d->FreeMemory(handle, memory, allocator); /* null is fine */
    for (Allocation **at = &d->allocations; *at; at = &(*at)->next)
        if ((*at)->memory == memory) {
            Allocation *a = *at;
            *at = a->next;
            d->counters.bytes -= a->bytes;
            free(a);
            return;
        }
}

/* kp's Tensor constructor makes a buffer, allocates (ignoring the result), binds, and maps what is to be
 * mapped. When the last two fail it throws: the tensor never exists, its destructor never runs, and what
 * was made for it is given back here. A failed allocation arrives as a null memory. */
static VkResult abandon_tensor(Device *d, VkBuffer buffer, VkDeviceMemory memory, VkResult result)
{
    d->DestroyBuffer(d->handle, buffer, NULL); /* null is fine for both */
    FreeMemory(d->handle, memory, NULL);
    d->bound_buffer = VK_NULL_HANDLE;
    d->bound_memory = VK_NULL_HANDLE;
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL BindBufferMemory(
    VkDevice handle, VkBuffer buffer, VkDeviceMemory memory, VkDeviceSize offset)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    VkResult result =
        memory ? d->BindBufferMemory(handle, buffer, memory, offset) : VK_ERROR_OUT_OF_DEVICE_MEMORY;
    if (keep(d, "vkBindBufferMemory", 0, result) != VK_SUCCESS)
        return abandon_tensor(d, buffer, memory, result);
    d->bound_buffer = buffer;
    d->bound_memory = memory;
    return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL MapMemory(
    VkDevice handle, VkDeviceMemory memory, VkDeviceSize offset, VkDeviceSize size, VkMemoryMapFlags flags,
    void **out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    VkResult result = refused(d, "vkMapMemory", size);
    if (result == VK_SUCCESS)
        result = keep(d, "vkMapMemory", size, d->MapMemory(handle, memory, offset, size, flags, out));
    if (result != VK_SUCCESS && memory == d->bound_memory)
        return abandon_tensor(d, d->bound_buffer, memory, result);
    return result;
}

/* kp asks only for coherent memory, which needs no flush; destroying a tensor, it flushes 0 bytes. */
static VKAPI_ATTR VkResult VKAPI_CALL FlushMappedMemoryRanges(
    VkDevice handle, uint32_t count, const VkMappedMemoryRange *ranges)
{
    for (uint32_t i = 0; i < count; i++)
        if (!ranges[i].size)
            return VK_SUCCESS;
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    return d->FlushMappedMemoryRanges(handle, count, ranges);
}

/* -------------------------------------------- objects that kp creates without looking at the result -- */

#define CREATE(Name, remember)                                                                        \
    static VKAPI_ATTR VkResult VKAPI_CALL Create##Name(                                               \
        VkDevice handle, const Vk##Name##CreateInfo *info, const VkAllocationCallbacks *allocator,    \
        Vk##Name *out)                                                                                \
    {                                                                                                 \
        DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);                                                      \
        *out = VK_NULL_HANDLE;                                                                        \
        VkResult result = refused(d, "vkCreate" #Name, 0);                                            \
        if (result == VK_SUCCESS)                                                                     \
            result = keep(d, "vkCreate" #Name, 0, d->Create##Name(handle, info, allocator, out));     \
        remember;                                                                                     \
        return result;                                                                                \
    }
CREATE(DescriptorPool, d->unfinished.pool = *out)
CREATE(ShaderModule, d->unfinished.shader = *out)
CREATE(PipelineCache, d->unfinished.cache = *out)
CREATE(CommandPool, (void)0)
CREATE(Fence, (void)0)

/* kp makes a layout for each of its algorithms. SwiftShader compiles a shader anew for each layout it is used
 * with, however alike they are; so those that are alike are one, which lives as long as the device. */
static void share(Device *d, VkDescriptorSetLayout set, VkPipelineLayout pipeline, uint32_t size)
{
    Layout *l = malloc(sizeof *l);
    if (l) { /* else it is kp's own */
        *l = (Layout){d->layouts, set, pipeline, size};
        d->layouts = l;
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL CreateDescriptorSetLayout(
    VkDevice handle, const VkDescriptorSetLayoutCreateInfo *info, const VkAllocationCallbacks *allocator,
    VkDescriptorSetLayout *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    *out = VK_NULL_HANDLE;
    VkResult result = refused(d, "vkCreateDescriptorSetLayout", 0);
    bool usual = !info->pNext && !info->flags;
    for (uint32_t i = 0; i < info->bindingCount; i++) {
        const VkDescriptorSetLayoutBinding *b = &info->pBindings[i];
        usual &= b->binding == i && b->descriptorType == VK_DESCRIPTOR_TYPE_STORAGE_BUFFER &&
                 b->descriptorCount == 1 && b->stageFlags == VK_SHADER_STAGE_COMPUTE_BIT;
    }
    for (Layout *l = d->layouts; l && usual && result == VK_SUCCESS && !*out; l = l->next)
        if (!l->pipeline && l->size == info->bindingCount)
            *out = l->set;
    if (result == VK_SUCCESS && !*out) {
        result = keep(d, "vkCreateDescriptorSetLayout", 0,
            d->CreateDescriptorSetLayout(handle, info, allocator, out));
        d->counters.layouts += result == VK_SUCCESS;
        if (result == VK_SUCCESS && usual)
            share(d, *out, VK_NULL_HANDLE, info->bindingCount);
    }
    d->unfinished.set_layout = *out;
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL CreatePipelineLayout(
    VkDevice handle, const VkPipelineLayoutCreateInfo *info, const VkAllocationCallbacks *allocator,
    VkPipelineLayout *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    *out = VK_NULL_HANDLE;
    VkResult result = refused(d, "vkCreatePipelineLayout", 0);
    const VkPushConstantRange *range = info->pPushConstantRanges;
    const bool usual = !info->pNext && !info->flags && info->setLayoutCount == 1 &&
                       info->pushConstantRangeCount == 1 && range->offset == 0 &&
                       range->stageFlags == VK_SHADER_STAGE_COMPUTE_BIT;
    for (Layout *l = d->layouts; l && usual && result == VK_SUCCESS && !*out; l = l->next)
        if (l->pipeline && l->set == info->pSetLayouts[0] && l->size == range->size)
            *out = l->pipeline;
    if (result == VK_SUCCESS && !*out) {
        result = keep(d, "vkCreatePipelineLayout", 0, d->CreatePipelineLayout(handle, info, allocator, out));
        d->counters.layouts += result == VK_SUCCESS;
        if (result == VK_SUCCESS && usual)
            share(d, info->pSetLayouts[0], *out, range->size);
    }
    d->unfinished.layout = *out;
    return result;
}

static VKAPI_ATTR void VKAPI_CALL DestroyDescriptorSetLayout(
    VkDevice handle, VkDescriptorSetLayout set, const VkAllocationCallbacks *allocator)
{
    DEVICE_OF(handle, );
    for (Layout *l = d->layouts; l; l = l->next)
        if (l->set == set)
            return;
    d->DestroyDescriptorSetLayout(handle, set, allocator);
}

static VKAPI_ATTR void VKAPI_CALL DestroyPipelineLayout(
    VkDevice handle, VkPipelineLayout pipeline, const VkAllocationCallbacks *allocator)
{
    DEVICE_OF(handle, );
    for (Layout *l = d->layouts; l; l = l->next)
        if (l->pipeline && l->pipeline == pipeline)
            return;
    d->DestroyPipelineLayout(handle, pipeline, allocator);
}

static VKAPI_ATTR VkResult VKAPI_CALL AllocateDescriptorSets(
    VkDevice handle, const VkDescriptorSetAllocateInfo *info, VkDescriptorSet *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    for (uint32_t i = 0; i < info->descriptorSetCount; i++)
        out[i] = VK_NULL_HANDLE;
    VkResult result = refused(d, "vkAllocateDescriptorSets", 0);
    if (result == VK_SUCCESS)
        result = keep(d, "vkAllocateDescriptorSets", 0, d->AllocateDescriptorSets(handle, info, out));
    return result;
}

static VKAPI_ATTR void VKAPI_CALL UpdateDescriptorSets(
    VkDevice handle, uint32_t writes, const VkWriteDescriptorSet *write, uint32_t copies,
    const VkCopyDescriptorSet *copy)
{
    for (uint32_t i = 0; i < writes; i++)
        if (!write[i].dstSet)
            return;
    DEVICE_OF(handle, );
    d->UpdateDescriptorSets(handle, writes, write, copies, copy);
}

/* The pipeline is the last thing that kp's Algorithm constructor makes. If it cannot be made (because
 * something before it could not) the constructor throws, the destructor never runs, and what it has made
 * so far is destroyed here. kp gives each pipeline an empty cache of its own; ours, if it is open, takes
 * its place. */
static VKAPI_ATTR VkResult VKAPI_CALL CreateComputePipelines(
    VkDevice handle, VkPipelineCache cache, uint32_t count, const VkComputePipelineCreateInfo *infos,
    const VkAllocationCallbacks *allocator, VkPipeline *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    for (uint32_t i = 0; i < count; i++)
        out[i] = VK_NULL_HANDLE;
    VkResult result = refused(d, "vkCreateComputePipelines", 0);
    VkComputePipelineCreateInfo full;
    if (d->next_subgroups_full && count == 1) { /* kp makes one at a time */
        full = infos[0];
        full.stage.flags |= VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT_EXT;
        infos = &full;
    }
    d->next_subgroups_full = false;
    if (result == VK_SUCCESS)
        result = keep(d, "vkCreateComputePipelines", 0,
            d->CreateComputePipelines(handle, d->cache ? d->cache : cache, count, infos, allocator, out));
    Unfinished u = d->unfinished;
    memset(&d->unfinished, 0, sizeof d->unfinished);
    if (result >= 0) {
        d->counters.pipelines += count;
        d->counters.pipelines_full += infos == &full;
        return result;
    }
    d->DestroyPipelineCache(handle, u.cache, NULL); /* null is fine for each of these */
    DestroyPipelineLayout(handle, u.layout, NULL);
    d->DestroyShaderModule(handle, u.shader, NULL);
    DestroyDescriptorSetLayout(handle, u.set_layout, NULL);
    d->DestroyDescriptorPool(handle, u.pool, NULL);
    return result;
}

/* -------------------------------------------------------------------------------------- commands -- */

static VKAPI_ATTR void VKAPI_CALL DestroyCommandPool(
    VkDevice handle, VkCommandPool pool, const VkAllocationCallbacks *allocator)
{
    DEVICE_OF(handle, );
    d->DestroyCommandPool(handle, pool, allocator); /* null is fine */
    for (Recording **at = &d->recordings; *at;)
        if ((*at)->pool == pool)
            forget_recording(d, at);
        else
            at = &(*at)->next;
}

static VKAPI_ATTR void VKAPI_CALL FreeCommandBuffers(
    VkDevice handle, VkCommandPool pool, uint32_t count, const VkCommandBuffer *buffers)
{
    DEVICE_OF(handle, );
    if (!pool)
        return; /* its creation failed, and so did all that came of it */
    d->FreeCommandBuffers(handle, pool, count, buffers);
    for (uint32_t i = 0; i < count; i++)
        for (Recording **at = &d->recordings; *at; at = &(*at)->next)
            if ((*at)->commands == buffers[i]) {
                forget_recording(d, at);
                break;
            }
}

static VKAPI_ATTR VkResult VKAPI_CALL AllocateCommandBuffers(
    VkDevice handle, const VkCommandBufferAllocateInfo *info, VkCommandBuffer *out)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    for (uint32_t i = 0; i < info->commandBufferCount; i++)
        out[i] = VK_NULL_HANDLE;
    VkResult result = refused(d, "vkAllocateCommandBuffers", 0);
    if (result == VK_SUCCESS)
        result = keep(d, "vkAllocateCommandBuffers", 0, d->AllocateCommandBuffers(handle, info, out));
    for (uint32_t i = 0; result == VK_SUCCESS && i < info->commandBufferCount; i++) {
        Recording *r = calloc(1, sizeof *r);
        if (r) {
            *r = (Recording){.next = d->recordings, .commands = out[i], .pool = info->commandPool};
            d->recordings = r;
        } else {
            result = keep(d, "vkAllocateCommandBuffers", sizeof *r, VK_ERROR_OUT_OF_HOST_MEMORY);
            FreeCommandBuffers(handle, info->commandPool, info->commandBufferCount, out);
            for (uint32_t j = 0; j < info->commandBufferCount; j++)
                out[j] = VK_NULL_HANDLE;
        }
    }
    return result;
}

/* The recording of a command buffer (each has one until it is freed), moved to the front of the list: the
 * next command is most likely its too. */
static Recording *recording_of(Device *d, VkCommandBuffer commands)
{
    Recording **at = &d->recordings;
    while (*at && (*at)->commands != commands)
        at = &(*at)->next;
    Recording *r = *at;
    if (!r)
        return NULL;
    *at = r->next;
    r->next = d->recordings;
    d->recordings = r;
    return r;
}

/* When all that was recorded so far has been done; nothing unless the recording is timed. */
static void timestamp(Device *d, Recording *r, VkCommandBuffer commands)
{
    if (r->queries_written < r->query_count)
        d->CmdWriteTimestamp(
            commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, r->queries, r->queries_written++);
}

static VKAPI_ATTR VkResult VKAPI_CALL BeginCommandBuffer(
    VkCommandBuffer commands, const VkCommandBufferBeginInfo *info)
{
    DEVICE_OF(commands, VK_ERROR_DEVICE_LOST);
    Recording *r = recording_of(d, commands);
    VkResult result = keep(d, "vkBeginCommandBuffer", 0, d->BeginCommandBuffer(commands, info));
    if (!r)
        return result;
    r->id = ++d->recording_count;
    r->dispatches = r->barriers = 0;
    r->transfers = false;
    d->next_is_independent = false;

    /* A timed recording resets its queries itself, so that each replay begins with a clean pool. */
    uint32_t queries = d->next_query_count;
    d->next_query_count = 0;
    d->DestroyQueryPool(d->handle, r->queries, NULL);
    r->queries = VK_NULL_HANDLE;
    r->query_count = r->queries_written = 0;
    if (!queries || result != VK_SUCCESS)
        return result;
    VkQueryPoolCreateInfo pool = {
        .sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO,
        .queryType = VK_QUERY_TYPE_TIMESTAMP,
        .queryCount = queries,
    };
    result = keep(d, "vkCreateQueryPool", 0, d->CreateQueryPool(d->handle, &pool, NULL, &r->queries));
    if (result != VK_SUCCESS) {
        r->queries = VK_NULL_HANDLE; /* the failure is kept; recording goes on untimed */
        return VK_SUCCESS;
    }
    r->query_count = queries;
    d->CmdResetQueryPool(commands, r->queries, 0, queries);
    timestamp(d, r, commands);
    return VK_SUCCESS;
}

/* The barrier rule. Before each command that touches memory goes one global memory barrier: everything
 * that compute (and transfer, if there was any) wrote before, in this command buffer or an earlier one of
 * the queue, is made available and visible to it, and it waits for everything that read what it may
 * overwrite. What the host wrote needs no mention: vkQueueSubmit itself orders it before all commands
 * (section 7.9). Each access flag has its stage in the same mask. */
static void barrier(
    Device *d, Recording *r, VkCommandBuffer commands, VkPipelineStageFlags to, VkAccessFlags access)
{
    if (d->barriers_off)
        return;
    VkPipelineStageFlags from = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT;
    VkMemoryBarrier memory = {VK_STRUCTURE_TYPE_MEMORY_BARRIER, NULL, VK_ACCESS_SHADER_WRITE_BIT, access};
    if (r->transfers || !r->barriers) { /* the first barrier also covers what earlier submissions copied */
        from |= VK_PIPELINE_STAGE_TRANSFER_BIT;
        memory.srcAccessMask |= VK_ACCESS_TRANSFER_WRITE_BIT;
    }
    d->CmdPipelineBarrier(commands, from, to, 0, 1, &memory, 0, NULL, 0, NULL);
    r->barriers++;
    d->counters.barriers_recorded++;
}

/* Drops the barrier that kp records for each tensor of a dispatch; any other one passes. */
static VKAPI_ATTR void VKAPI_CALL CmdPipelineBarrier(
    VkCommandBuffer commands, VkPipelineStageFlags from, VkPipelineStageFlags to, VkDependencyFlags flags,
    uint32_t memory_count, const VkMemoryBarrier *memory, uint32_t buffer_count,
    const VkBufferMemoryBarrier *buffers, uint32_t image_count, const VkImageMemoryBarrier *images)
{
    DEVICE_OF(commands, );
    bool of_kp = from == VK_PIPELINE_STAGE_TRANSFER_BIT && to == VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT &&
                 !memory_count && !image_count && buffer_count == 1 &&
                 buffers->srcAccessMask == VK_ACCESS_TRANSFER_WRITE_BIT &&
                 buffers->dstAccessMask == VK_ACCESS_SHADER_READ_BIT;
    if (of_kp && !d->barriers_off)
        d->counters.barriers_dropped++;
    else
        d->CmdPipelineBarrier(
            commands, from, to, flags, memory_count, memory, buffer_count, buffers, image_count, images);
}

static VKAPI_ATTR void VKAPI_CALL CmdDispatch(VkCommandBuffer commands, uint32_t x, uint32_t y, uint32_t z)
{
    DEVICE_OF(commands, );
    Recording *r = recording_of(d, commands);
    /* The first dispatch is never independent: submissions before this one may have written anything. */
    if (r && (!d->next_is_independent || !r->barriers))
        barrier(d, r, commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
            VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT);
    d->next_is_independent = false;
    if (d->next_groups[0]) {
        x = d->next_groups[0], y = d->next_groups[1], z = d->next_groups[2];
        d->next_groups[0] = 0;
    }
    d->CmdDispatch(commands, x, y, z);
    d->counters.dispatches_recorded++;
    if (r) {
        r->dispatches++;
        timestamp(d, r, commands);
    }
}

static VKAPI_ATTR void VKAPI_CALL CmdCopyBuffer(
    VkCommandBuffer commands, VkBuffer from, VkBuffer to, uint32_t count, const VkBufferCopy *regions)
{
    DEVICE_OF(commands, );
    Recording *r = recording_of(d, commands);
    if (r) {
        barrier(d, r, commands, VK_PIPELINE_STAGE_TRANSFER_BIT,
            VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT);
        r->transfers = true;
    }
    d->CmdCopyBuffer(commands, from, to, count, regions);
}

/* A fence tells the host that the device has finished, not that its writes can be seen: that takes a
 * barrier towards the host stage (section 7.1, and the note under vkWaitForFences). */
static VKAPI_ATTR VkResult VKAPI_CALL EndCommandBuffer(VkCommandBuffer commands)
{
    DEVICE_OF(commands, VK_ERROR_DEVICE_LOST);
    Recording *r = recording_of(d, commands);
    if (r && (r->dispatches || r->transfers))
        barrier(d, r, commands, VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT);
    return keep(d, "vkEndCommandBuffer", 0, d->EndCommandBuffer(commands));
}

/* ---------------------------------------------------------------------------------- submit and wait -- */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static VKAPI_ATTR VkResult VKAPI_CALL QueueSubmit(
    VkQueue queue, uint32_t count, const VkSubmitInfo *infos, VkFence fence)
{
    DEVICE_OF(queue, VK_ERROR_DEVICE_LOST);
    VkResult result = refused(d, "vkQueueSubmit", 0);
    if (result != VK_SUCCESS)
        return result;
    const uint64_t begin = now_ns();
    result = keep(d, "vkQueueSubmit", 0, d->QueueSubmit(queue, count, infos, fence));
    d->counters.submit_ns += now_ns() - begin;
    d->counters.submits++;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; j < infos[i].commandBufferCount; j++) {
            Recording *r = recording_of(d, infos[i].pCommandBuffers[j]);
            d->counters.dispatches_run += r ? r->dispatches : 0;
            d->counters.barriers_run += r ? r->barriers : 0;
        }
    return result;
}

/* kp ignores a failed submit and waits, without limit, for a fence that nothing will signal.
 *
 * A thread that sleeps on a fence wakes by an interrupt: 0.5 ms after the end on an NVIDIA driver in a
 * virtual machine, as long as a small model's whole step. So the fence is polled first, for longer than a decode step takes. */
static VKAPI_ATTR VkResult VKAPI_CALL WaitForFences(
    VkDevice handle, uint32_t count, const VkFence *fences, VkBool32 all, uint64_t timeout)
{
    DEVICE_OF(handle, VK_ERROR_DEVICE_LOST);
    if (d->failure.result)
        return d->failure.result;
    const uint64_t begin = now_ns();
    VkResult result = VK_NOT_READY;
    if (count == 1 && d->GetFenceStatus)
        while (result == VK_NOT_READY && now_ns() - begin < d->poll_ns && now_ns() - begin < timeout)
            result = d->GetFenceStatus(handle, fences[0]);
    if (result == VK_NOT_READY)
        result = d->WaitForFences(handle, count, fences, all, timeout);
    d->counters.wait_ns += now_ns() - begin;
    VkResult planted = injected("vkWaitForFences"); /* after the wait: the device must not be running still */
    return keep(d, "vkWaitForFences", 0, planted ? planted : result);
}

/* ------------------------------------------------------------------------- the way in for the loader -- */

static PFN_vkVoidFunction intercepted(const char *name);

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetDeviceProcAddr(VkDevice handle, const char *name)
{
    PFN_vkVoidFunction ours = intercepted(name);
    Device *d = ours ? NULL : device_of(handle);
    return ours ? ours : d ? d->GetDeviceProcAddr(handle, name) : NULL;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetInstanceProcAddr(VkInstance handle, const char *name)
{
    PFN_vkVoidFunction ours = intercepted(name);
    Instance *instance = ours || !handle ? NULL : instance_of(handle);
    return ours ? ours : instance ? instance->GetInstanceProcAddr(handle, name) : NULL;
}

static PFN_vkVoidFunction intercepted(const char *name)
{
#define OURS(Name) {"vk" #Name, (PFN_vkVoidFunction)Name}
    static const struct {
        const char *name;
        PFN_vkVoidFunction function;
    } table[] = {
        OURS(GetInstanceProcAddr), OURS(GetDeviceProcAddr), OURS(CreateInstance), OURS(DestroyInstance),
        OURS(CreateDevice), OURS(DestroyDevice), OURS(CreateBuffer), OURS(GetBufferMemoryRequirements),
        OURS(AllocateMemory), OURS(FreeMemory), OURS(BindBufferMemory), OURS(MapMemory),
        OURS(FlushMappedMemoryRanges), OURS(CreateDescriptorPool), OURS(CreateDescriptorSetLayout),
        OURS(AllocateDescriptorSets), OURS(UpdateDescriptorSets), OURS(CreateShaderModule),
        OURS(CreatePipelineLayout), OURS(DestroyDescriptorSetLayout), OURS(DestroyPipelineLayout),
        OURS(CreatePipelineCache), OURS(CreateComputePipelines),
        OURS(CreateFence), OURS(CreateCommandPool), OURS(DestroyCommandPool),
        OURS(AllocateCommandBuffers), OURS(FreeCommandBuffers), OURS(BeginCommandBuffer),
        OURS(EndCommandBuffer), OURS(CmdPipelineBarrier), OURS(CmdDispatch), OURS(CmdCopyBuffer),
        OURS(QueueSubmit), OURS(WaitForFences),
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            return table[i].function;
    return NULL;
}

EXPORT VKAPI_ATTR VkResult VKAPI_CALL vkNegotiateLoaderLayerInterfaceVersion(
    VkNegotiateLayerInterface *version)
{
    if (version->loaderLayerInterfaceVersion < 2)
        return VK_ERROR_INITIALIZATION_FAILED;
    version->loaderLayerInterfaceVersion = 2;
    version->pfnGetInstanceProcAddr = GetInstanceProcAddr;
    version->pfnGetDeviceProcAddr = GetDeviceProcAddr;
    version->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}

/* ------------------------------------------------------------------------- the way in for Python -- */

/* A device is named by its id; with one that is gone every function does nothing and returns 0 (or -1
 * where it returns a result), so a late call cannot crash. */

EXPORT uint32_t xinfer_abi_version(void) { return ABI_VERSION; }

/* The id of the device that this thread made last and has not asked for yet; 0: the layer was not in
 * the way. Asked right after kp.Manager(). */
EXPORT uint64_t xinfer_take_newest_device(void)
{
    uint64_t id = newest_device;
    newest_device = 0;
    return id;
}

EXPORT uint32_t xinfer_features(uint64_t id)
{
    ON_DEVICE(id);
    return d ? d->features : 0;
}

EXPORT void xinfer_uuid(uint64_t id, uint8_t out[VK_UUID_SIZE])
{
    ON_DEVICE(id);
    if (d)
        memcpy(out, d->uuid, VK_UUID_SIZE);
}

EXPORT void xinfer_counters(uint64_t id, Counters *out)
{
    ON_DEVICE(id);
    if (d)
        *out = d->counters;
}

/* The first failure since the last call, which clears it; its result is returned, 0 if there was none. */
EXPORT int32_t xinfer_take_failure(uint64_t id, Failure *out)
{
    ON_DEVICE(id);
    if (!d || !d->failure.result)
        return 0;
    *out = d->failure;
    memset(&d->failure, 0, sizeof d->failure);
    return out->result;
}

/* Said before the next dispatch is recorded: it neither reads nor overwrites what the dispatches since
 * the last barrier wrote, nor writes what they read. */
EXPORT void xinfer_next_is_independent(uint64_t id)
{
    ON_DEVICE(id);
    if (d)
        d->next_is_independent = true;
}

/* Said before the next dispatch is recorded: its group counts, each at least 1. Kompute fixes them when it makes
 * an Algorithm; this way one pipeline serves dispatches of any size. (Before the first dispatch of a sequence
 * this comes before vkBeginCommandBuffer, which kp calls as late as that.) */
EXPORT void xinfer_next_groups(uint64_t id, uint32_t x, uint32_t y, uint32_t z)
{
    ON_DEVICE(id);
    if (d)
        d->next_groups[0] = x, d->next_groups[1] = y, d->next_groups[2] = z;
}

/* Said before the next allocation of mapped memory: the host will read what the device writes there. */
EXPORT void xinfer_next_is_read_back(uint64_t id)
{
    ON_DEVICE(id);
    if (d)
        d->next_is_read_back = true;
}

/* Said before each pipeline is made: whether its shader counts on it that all subgroups have all their lanes (and
 * the device's subgroup size, which without VK_..._ALLOW_VARYING_SUBGROUP_SIZE they have anyway). Only where
 * FEATURE_SUBGROUP_SIZE_CONTROL is on, and for workgroups of whole subgroups. */
EXPORT void xinfer_next_subgroups_full(uint64_t id, int32_t full)
{
    ON_DEVICE(id);
    if (d)
        d->next_subgroups_full = full && (d->features & FEATURE_SUBGROUP_SIZE_CONTROL) != 0;
}

/* The address of the buffer that was bound to memory last, for shaders; 0 if buffers have none. */
EXPORT uint64_t xinfer_newest_address(uint64_t id)
{
    ON_DEVICE(id);
    if (!d || !(d->features & FEATURE_BUFFER_ADDRESS) || !d->bound_buffer)
        return 0;
    VkBufferDeviceAddressInfoKHR info = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO_KHR, .buffer = d->bound_buffer};
    return d->GetBufferDeviceAddressKHR(d->handle, &info);
}

/* For tests: what an allocation of type `asked` that is read back gets on a device with these types. */
EXPORT uint32_t xinfer_cached_type(
    const uint32_t *flags, const uint32_t *heaps, uint32_t count, uint32_t asked, uint32_t bits)
{
    VkPhysicalDeviceMemoryProperties memory = {.memoryTypeCount = count};
    for (uint32_t i = 0; i < count; i++)
        memory.memoryTypes[i] = (VkMemoryType){flags[i], heaps[i]};
    return cached_type(&memory, asked, bits);
}

/* For the tests' positive control: with barriers off, kp's own pass and ours are not made. */
EXPORT void xinfer_set_barriers(uint64_t id, int32_t on)
{
    ON_DEVICE(id);
    if (d)
        d->barriers_off = !on;
}

/* The next command buffer to begin gets room for `dispatches` timestamps. */
EXPORT void xinfer_time_next_recording(uint64_t id, uint32_t dispatches)
{
    ON_DEVICE(id);
    if (d)
        d->next_query_count = dispatches + 1;
}

/* The id of the command buffer that was begun last. */
EXPORT uint64_t xinfer_newest_recording(uint64_t id)
{
    ON_DEVICE(id);
    return d ? d->recording_count : 0;
}

/* The timestamps of a recording's last run, in the queue's ticks: one from its start and one from the end
 * of each dispatch. Returns how many there are (none if it was not timed); fills at most `capacity`. */
EXPORT uint32_t xinfer_timestamps(uint64_t id, uint64_t recording, uint64_t *out, uint32_t capacity)
{
    ON_DEVICE(id);
    for (Recording *r = d ? d->recordings : NULL; r; r = r->next)
        if (r->id == recording && r->queries) {
            uint32_t n = r->queries_written < capacity ? r->queries_written : capacity;
            VkResult result = n == 0 ? VK_SUCCESS : d->GetQueryPoolResults(
                d->handle, r->queries, 0, n, n * sizeof *out, out, sizeof *out,
                VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT);
            return keep(d, "vkGetQueryPoolResults", 0, result) == VK_SUCCESS ? r->queries_written : 0;
        }
    return 0;
}

/* From now on every pipeline is made through one cache that begins with these bytes (which Python has
 * checked: a driver may trust them). Returns a VkResult; a failure leaves things as they were. */
EXPORT int32_t xinfer_cache_open(uint64_t id, const void *data, size_t size)
{
    ON_DEVICE(id);
    if (!d || d->cache)
        return -1;
    VkPipelineCacheCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO, .initialDataSize = size, .pInitialData = data};
    VkResult result = d->CreatePipelineCache(d->handle, &info, NULL, &d->cache);
    if (result != VK_SUCCESS)
        d->cache = VK_NULL_HANDLE;
    return result;
}

/* The cache's bytes: with `data` null only their number goes to `size`. Returns a VkResult. */
EXPORT int32_t xinfer_cache_data(uint64_t id, void *data, size_t *size)
{
    ON_DEVICE(id);
    return d && d->cache ? d->GetPipelineCacheData(d->handle, d->cache, size, data) : -1;
}

/* Plants a fault: the nth call of `function` from now on, on any device, fails with `result`; what a
 * real failure would leave undone is not done. The functions that look: vkCreateBuffer,
 * vkAllocateMemory, vkMapMemory, vkCreate{DescriptorPool,DescriptorSetLayout,ShaderModule,
 * PipelineLayout,PipelineCache,CommandPool,Fence,ComputePipelines}, vkAllocate{DescriptorSets,
 * CommandBuffers}, vkQueueSubmit, vkWaitForFences. nth 0 clears all. Returns 0, or -1 if full. */
EXPORT int32_t xinfer_inject(const char *function, uint32_t nth, int32_t result)
{
    int32_t done = -1;
    pthread_mutex_lock(&lock);
    if (nth == 0) {
        memset(injections, 0, sizeof injections);
        done = 0;
    }
    for (int i = 0; i < MAX_INJECTIONS && done; i++)
        if (!injections[i].countdown) {
            strncpy(injections[i].function, function, sizeof injections[i].function - 1);
            injections[i].function[sizeof injections[i].function - 1] = 0;
            injections[i].countdown = nth;
            injections[i].result = (VkResult)result;
            done = 0;
        }
    pthread_mutex_unlock(&lock);
    return done;
}
