/* The companion layer on a driver that does nothing, for sanitizers: test_layer_native.py compiles and runs it.
 * One argument names the case. Exit code 0: all is well. */
#include "layer.c"
#include <stdio.h>

#define REQUIRE(condition)                                                   \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition);  \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

/* A dispatchable object: what the loader keeps at its start points to itself, so that each has a key of its own. */
typedef struct {
    void *key;
} Object;

static Object *object(void)
{
    Object *o = malloc(sizeof *o);
    REQUIRE(o);
    o->key = o;
    return o;
}

static _Atomic int living;                /* instances and devices that the driver has made and not destroyed */
static bool driver_fails;                 /* the next creation */
static bool portable;                     /* the device has VK_KHR_portability_subset */
static bool features_refused;             /* a device with features in its chain is not made */
static _Atomic bool saw_portability, saw_storage; /* extensions of the device that was made last */

static VkResult make(void **out)
{
    if (driver_fails)
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    *out = object();
    living++;
    return VK_SUCCESS;
}

static void unmake(void *o)
{
    free(o);
    living--;
}

static VkResult driver_create_instance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *allocator, VkInstance *out)
{
    (void)info, (void)allocator;
    return make((void **)out);
}

static void driver_destroy_instance(VkInstance i, const VkAllocationCallbacks *a) { (void)a, unmake(i); }

static VkResult driver_create_device(
    VkPhysicalDevice p, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *allocator, VkDevice *out)
{
    (void)p, (void)allocator;
    const VkBaseInStructure *first = info->pNext;
    if (features_refused && first && first->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2)
        return VK_ERROR_FEATURE_NOT_PRESENT;
    saw_portability = saw_storage = false;
    for (uint32_t i = 0; i < info->enabledExtensionCount; i++) {
        const char *name = info->ppEnabledExtensionNames[i];
        saw_portability = saw_portability || !strcmp(name, "VK_KHR_portability_subset");
        saw_storage = saw_storage || !strcmp(name, VK_KHR_8BIT_STORAGE_EXTENSION_NAME);
    }
    return make((void **)out);
}

static void driver_destroy_device(VkDevice d, const VkAllocationCallbacks *a) { (void)a, unmake(d); }

static VkResult driver_extensions(VkPhysicalDevice p, const char *layer, uint32_t *count, VkExtensionProperties *out)
{
    (void)p, (void)layer;
    *count = 1 + portable;
    if (out)
        strcpy(out[0].extensionName, VK_KHR_8BIT_STORAGE_EXTENSION_NAME);
    if (out && portable)
        strcpy(out[1].extensionName, "VK_KHR_portability_subset");
    return VK_SUCCESS;
}

static void driver_features(VkPhysicalDevice p, VkPhysicalDeviceFeatures2 *out)
{
    (void)p;
    for (VkBaseOutStructure *s = (void *)out; s; s = s->pNext)
        if (s->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_8BIT_STORAGE_FEATURES)
            ((VkPhysicalDevice8BitStorageFeatures *)s)->storageBuffer8BitAccess = VK_TRUE;
}

static void driver_properties(VkPhysicalDevice p, VkPhysicalDeviceProperties *out) { (void)p, (void)out; }
static void driver_properties2(VkPhysicalDevice p, VkPhysicalDeviceProperties2 *out) { (void)p, (void)out; }
static void driver_memory(VkPhysicalDevice p, VkPhysicalDeviceMemoryProperties *out) { (void)p, (void)out; }
static void driver_destroy_cache(VkDevice d, VkPipelineCache c, const VkAllocationCallbacks *a)
{
    (void)d, (void)c, (void)a;
}
static VkResult driver_cache_data(VkDevice d, VkPipelineCache c, size_t *size, void *data)
{
    (void)d, (void)c, (void)data;
    *size = 4;
    return VK_SUCCESS;
}
static VkResult driver_create_cache(
    VkDevice d, const VkPipelineCacheCreateInfo *info, const VkAllocationCallbacks *a, VkPipelineCache *out)
{
    (void)d, (void)info, (void)a;
    *out = (VkPipelineCache)(uintptr_t)1;
    return VK_SUCCESS;
}

static PFN_vkVoidFunction driver_function(const char *name)
{
#define DRIVER(Name, function) {"vk" #Name, (PFN_vkVoidFunction)function}
    static const struct {
        const char *name;
        PFN_vkVoidFunction function;
    } table[] = {
        DRIVER(CreateInstance, driver_create_instance), DRIVER(DestroyInstance, driver_destroy_instance),
        DRIVER(CreateDevice, driver_create_device), DRIVER(DestroyDevice, driver_destroy_device),
        DRIVER(EnumerateDeviceExtensionProperties, driver_extensions),
        DRIVER(GetPhysicalDeviceFeatures2, driver_features),
        DRIVER(GetPhysicalDeviceProperties, driver_properties),
        DRIVER(GetPhysicalDeviceProperties2, driver_properties2),
        DRIVER(GetPhysicalDeviceMemoryProperties, driver_memory),
        DRIVER(CreatePipelineCache, driver_create_cache), DRIVER(DestroyPipelineCache, driver_destroy_cache),
        DRIVER(GetPipelineCacheData, driver_cache_data),
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            return table[i].function;
    return NULL;
}

static PFN_vkVoidFunction next_of_instance(VkInstance i, const char *name) { (void)i; return driver_function(name); }
static PFN_vkVoidFunction next_of_device(VkDevice d, const char *name) { (void)d; return driver_function(name); }

static VkResult open_instance(VkInstance *out)
{
    VkLayerInstanceLink here = {.pfnNextGetInstanceProcAddr = next_of_instance};
    VkLayerInstanceCreateInfo link = {
        .sType = VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO, .function = VK_LAYER_LINK_INFO};
    link.u.pLayerInfo = &here;
    VkInstanceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pNext = &link};
    return CreateInstance(&info, NULL, out);
}

/* The layer tells a physical device's instance by its key. */
static VkResult open_device(VkInstance instance, VkDevice *out)
{
    VkLayerDeviceLink here = {
        .pfnNextGetInstanceProcAddr = next_of_instance, .pfnNextGetDeviceProcAddr = next_of_device};
    VkLayerDeviceCreateInfo link = {
        .sType = VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO, .function = VK_LAYER_LINK_INFO};
    link.u.pLayerInfo = &here;
    VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &link};
    return CreateDevice((VkPhysicalDevice)instance, &info, NULL, out);
}

enum { MANY = 200 };

/* Far more at once than the tables once held, and what fails is destroyed by nobody twice. */
static void many(void)
{
    static VkInstance i[MANY];
    static VkDevice d[MANY];
    for (int n = 0; n < MANY; n++) {
        REQUIRE(open_instance(&i[n]) == VK_SUCCESS && open_device(i[n], &d[n]) == VK_SUCCESS);
        REQUIRE(xinfer_take_newest_device() == (uint64_t)n + 1);
    }
    driver_fails = true;
    VkInstance no_instance;
    VkDevice no_device;
    REQUIRE(open_instance(&no_instance) < 0 && open_device(i[0], &no_device) < 0);
    driver_fails = false;
    for (int n = 0; n < MANY; n++) { /* from both ends */
        int at = n % 2 ? n : MANY - 2 - n;
        DestroyDevice(d[at], NULL);
        DestroyInstance(i[at], NULL);
    }
    REQUIRE(living == 0 && !instances && !devices);
}

/* Handles that the layer does not know end in an error or in nothing. */
static void unknown(void)
{
    Object stranger;
    stranger.key = &stranger;
    VkDevice d = (VkDevice)&stranger;
    VkCommandBuffer c = (VkCommandBuffer)&stranger;
    VkBufferCreateInfo buffer = {.size = 4};
    VkBuffer no_buffer;
    VkMemoryRequirements requirements;
    VkFence no_fence;
    VkSubmitInfo submit = {.commandBufferCount = 1, .pCommandBuffers = &c};
    REQUIRE(CreateBuffer(d, &buffer, NULL, &no_buffer) < 0);
    GetBufferMemoryRequirements(d, VK_NULL_HANDLE, &requirements);
    REQUIRE(requirements.memoryTypeBits == 0);
    REQUIRE(CreateFence(d, NULL, NULL, &no_fence) < 0);
    REQUIRE(BeginCommandBuffer(c, NULL) < 0 && EndCommandBuffer(c) < 0);
    CmdDispatch(c, 1, 1, 1);
    CmdCopyBuffer(c, VK_NULL_HANDLE, VK_NULL_HANDLE, 0, NULL);
    REQUIRE(QueueSubmit((VkQueue)&stranger, 1, &submit, VK_NULL_HANDLE) < 0);
    FreeMemory(d, VK_NULL_HANDLE, NULL);
    DestroyDevice(d, NULL);
    DestroyInstance((VkInstance)&stranger, NULL);

    VkInstance instance;
    REQUIRE(open_instance(&instance) == VK_SUCCESS && open_device(instance, &d) == VK_SUCCESS);
    REQUIRE(!recording_of(device_of(d), c)); /* the search for a command buffer ends */
    DestroyDevice(d, NULL);
    DestroyInstance(instance, NULL);
}

/* What lacks a part of Vulkan says so by an extension, which then must be on, with our features or without. */
static void portability(void)
{
    VkInstance instance;
    REQUIRE(open_instance(&instance) == VK_SUCCESS);
    for (int n = 0; n < 4; n++) {
        portable = n & 1, features_refused = n & 2;
        VkDevice d;
        REQUIRE(open_device(instance, &d) == VK_SUCCESS);
        REQUIRE(saw_portability == portable && saw_storage == !features_refused);
        DestroyDevice(d, NULL);
    }
    DestroyInstance(instance, NULL);
}

static _Atomic uint64_t newest;
static _Atomic bool over;

static void *ask(void *nothing)
{
    while (!over) {
        Failure failure;
        Counters counters;
        size_t size = 0;
        uint64_t id = newest;
        xinfer_features(id);
        xinfer_counters(id, &counters);
        xinfer_take_failure(id, &failure);
        xinfer_cache_data(id, NULL, &size);
    }
    return nothing;
}

static void *open_and_close(void *nothing)
{
    for (int n = 0; n < 2000; n++) {
        VkInstance i;
        VkDevice d;
        REQUIRE(open_instance(&i) == VK_SUCCESS && open_device(i, &d) == VK_SUCCESS);
        uint64_t id = xinfer_take_newest_device();
        xinfer_cache_open(id, NULL, 0);
        newest = id;
        DestroyDevice(d, NULL);
        DestroyInstance(i, NULL);
    }
    return nothing;
}

/* Calls for a device that another thread destroys meanwhile. */
static void threads(void)
{
    pthread_t makers[2], askers[2];
    for (int n = 0; n < 2; n++) {
        REQUIRE(!pthread_create(&makers[n], NULL, open_and_close, NULL));
        REQUIRE(!pthread_create(&askers[n], NULL, ask, NULL));
    }
    for (int n = 0; n < 2; n++)
        pthread_join(makers[n], NULL);
    over = true;
    for (int n = 0; n < 2; n++)
        pthread_join(askers[n], NULL);
    REQUIRE(living == 0 && !instances && !devices);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"many", many}, {"unknown", unknown}, {"portability", portability}, {"threads", threads}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
        if (count == 2 && !strcmp(arguments[1], cases[n].name)) {
            cases[n].run();
            return 0;
        }
    return 2;
}
